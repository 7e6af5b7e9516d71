"""What the loggers of tracking services share."""

from pathlib import Path

import pytest

from rft.logger.service import check_package, completions_table, run_id
from tests.logger.records import build


def test_a_table_has_a_column_for_every_key_and_the_step_first() -> None:
    rows = [{"set": "train", "score": 1.0}, {"set": "eval/a", "score": 0.0, "data_source": ["ß", 1]}]
    assert completions_table(3, rows) == (
        ["step", "set", "score", "data_source"],
        [[3, "train", 1.0, None], [3, "eval/a", 0.0, '["ß", 1]']],
    )


def test_a_folder_keeps_its_id_at_a_service(tmp_path: Path) -> None:
    first = run_id(tmp_path, "wandb")
    assert run_id(tmp_path, "wandb") == first == (tmp_path / "wandb_id").read_text()
    assert run_id(tmp_path, "swanlab") != first


@pytest.mark.parametrize("name", ["mlflow", "swanlab", "tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_named_with_its_cure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"logger={name}: .* pip install 'rft\[{name}\]'"):
        build(name).check()


def test_an_installed_package_passes() -> None:
    check_package("rich")
