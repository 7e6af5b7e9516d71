"""Which folder a run gets."""

import json

import pytest
from omegaconf import OmegaConf

from rft.train.run_folder import choose_folder, finish_folder

CONFIG = {
    "name": "run",
    "seed": 0,
    "lr": 1e-6,
    "plugins": [],
    "warmup": None,
    "actor": {"path": None, "sizes": [1, 2.0]},
}


@pytest.fixture
def wanted(tmp_path):
    return tmp_path / "outputs" / "run"


def test_a_free_folder_is_taken_and_holds_the_config(wanted):
    assert choose_folder(wanted, CONFIG, resume=True) == (wanted, "")
    assert OmegaConf.to_container(OmegaConf.load(wanted / "config.yaml")) == CONFIG
    assert [path.name for path in wanted.iterdir()] == ["config.yaml"]


def test_an_empty_folder_is_free(wanted):
    wanted.mkdir(parents=True)
    assert choose_folder(wanted, CONFIG, resume=True) == (wanted, "")


def test_a_folder_with_an_evaluation_alone_is_free(wanted):
    wanted.mkdir(parents=True)
    (wanted / "evaluation.json").touch()
    (wanted / "answers.jsonl").touch()
    assert choose_folder(wanted, CONFIG, resume=True)[0] == wanted
    other = wanted.with_name("other")
    other.mkdir()
    (other / "completions.jsonl").touch()
    assert choose_folder(other, CONFIG, resume=True)[0].name == "other-2"


def test_an_unfinished_run_of_the_same_config_is_continued(wanted):
    choose_folder(wanted, CONFIG, resume=True)
    (wanted / "metrics.jsonl").write_text("{}")
    folder, said = choose_folder(wanted, json.loads(json.dumps(CONFIG)) | {"cache": "another"}, resume=True)
    assert folder == wanted
    assert said == f"{wanted} holds an unfinished run of this config: continuing it"
    assert (wanted / "metrics.jsonl").read_text() == "{}"


@pytest.mark.parametrize("reason", ["finished", "other config", "resume=false", "someone else's", "a file"])
def test_a_taken_folder_is_left_alone(wanted, reason):
    config, resume = CONFIG, True
    if reason == "a file":
        wanted.parent.mkdir()
        wanted.write_text("mine")
    elif reason == "someone else's":
        wanted.mkdir(parents=True)
        (wanted / "thesis.tex").write_text("mine")
    else:
        choose_folder(wanted, CONFIG, resume=True)
    if reason == "finished":
        finish_folder(wanted, {"eval/accuracy": 0.5})
    elif reason == "other config":
        config = CONFIG | {"lr": 2e-6}
    elif reason == "resume=false":
        resume = False
    folder, said = choose_folder(wanted, config, resume)
    assert folder == wanted.with_name("run-2")
    assert said == f"{wanted} is taken: this run is in {folder}"
    assert OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) == config


def test_the_first_free_number_is_taken_and_a_numbered_run_is_continued(wanted):
    other = CONFIG | {"seed": 1}
    choose_folder(wanted, CONFIG, resume=True)
    second, _ = choose_folder(wanted, other, resume=True)
    assert choose_folder(wanted, CONFIG | {"seed": 2}, resume=True)[0].name == "run-3"
    folder, said = choose_folder(wanted, other, resume=True)
    assert folder == second and folder.name == "run-2" and "continuing" in said
    finish_folder(second, {})
    assert choose_folder(wanted, other, resume=True)[0].name == "run-4"


def test_a_name_with_a_dot_keeps_it(tmp_path):
    wanted = tmp_path / "Qwen2.5-lr0.1"
    choose_folder(wanted, CONFIG, resume=False)
    assert choose_folder(wanted, CONFIG, resume=False)[0].name == "Qwen2.5-lr0.1-2"


def test_a_folder_that_cannot_be_made_names_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^output_dir: the folder .* cannot be made \(.*\); set output_dir$"):
        choose_folder(tmp_path / "file" / "run", CONFIG, resume=True)


def test_a_finished_run_has_its_numbers(wanted):
    choose_folder(wanted, CONFIG, resume=True)
    finish_folder(wanted, {"b": 2.0, "a": 1.0})
    assert json.loads((wanted / "result.json").read_text()) == {"a": 1.0, "b": 2.0}
    assert sorted(path.name for path in wanted.iterdir()) == ["config.yaml", "result.json"]
