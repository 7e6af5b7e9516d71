"""A yaml file that cannot be read gets one line with its path."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rft.setup.yaml_errors import YAML_ERRORS, broken_yaml

BODY = b"defaults:\n  - main\n  - _self_\nname: \xc3\xa9\nbatch: {prompts: 4}\nplugins: [a, 'b']\n"


@settings(deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.integers(0, len(BODY)),
    cut=st.integers(0, 3),
    put=st.sampled_from([b"", b"\0", b"\xff", b"'", b"{", b"]", b"\t", b": ", b"&a *a", b"!x ", b"- ", b"\n", b"%"]),
)
@example(place=0, cut=0, put=b"a: " + b"[" * 500)
@example(place=0, cut=0, put=b"".join(b" " * level + b"a:\n" for level in range(500)))
@example(place=0, cut=0, put=b"name: 1\n")
@example(place=0, cut=0, put=b"\xff\xfe")
@example(place=0, cut=0, put=b"seed: " + b"9" * 5000 + b"\n")
def test_a_damaged_file_is_read_or_named_in_one_line(place: int, cut: int, put: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(BODY[:place] + put + BODY[place + cut :])
    message = broken_yaml([str(tmp_path), None])
    if message is None:
        OmegaConf.load(path)
    else:
        assert message.startswith(str(path)) and "\n" not in message
        with pytest.raises((*YAML_ERRORS, ValueError, OSError)):
            OmegaConf.load(path)


def test_files_that_can_be_read_give_no_message(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(BODY)
    assert broken_yaml([str(tmp_path)]) is None and broken_yaml([None]) is None
