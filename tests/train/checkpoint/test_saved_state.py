"""A state whose content is not what the program reads is one error that names the checkpoint."""

import re

import pytest
import torch
from safetensors.torch import save_file

from rft.train.checkpoint.saved_state import SavedState

TENSOR = '{"$tensor": "w", "dtype": "float32", "shape": [2]}'


@pytest.fixture
def make(tmp_path):
    """A checkpoint with a state of this text and a tensor of this name."""

    def write(text, name="w"):
        (tmp_path / "state.json").write_text(text)
        save_file({name: torch.ones(2)}, tmp_path / "model.safetensors")
        return SavedState(tmp_path)

    return write


def test_a_state_is_read_by_its_keys(make):
    saved = make(f'{{"step": 3, "actors": {{"actor": {{"w": {TENSOR}, "scale": 2.0}}}}}}')
    assert (list(saved), len(saved), saved["step"], saved.keys_of("actors")) == (["step", "actors"], 2, 3, ["actor"])
    assert saved["actors"]["actor"]["w"].tolist() == [1, 1]
    assert saved.fill("actors", "actor", {}, left_out=("w",)) == {"scale": 2.0}


UNREADABLE = {
    "a key that is missing": ("{}", "w", lambda saved: saved["step"]),
    "a part that is missing": ('{"actors": {}}', "w", lambda saved: saved.fill("actors", "actor", {})),
    "a part of another kind": ('{"actors": 3}', "w", lambda saved: saved.keys_of("actors")),
    "a list in place of a mapping": ('{"actors": {"actor": []}}', "w", lambda saved: saved.fill("actors", "actor", {})),
    "a text in place of a number": ('{"step": "3"}', "w", lambda saved: saved["step"]),
    "a number in place of a mapping": ('{"numbers": 3}', "w", lambda saved: saved["numbers"]),
    "no mapping": ("3", "w", lambda saved: saved),
    "no JSON": ('{"step": ', "w", lambda saved: saved),
    "an unfinished text": ('"', "w", lambda saved: saved),
    "another tensor": (f'{{"w": {TENSOR}}}', "v", lambda saved: saved["w"]),
    "a tensor of another shape": (f'{{"w": {TENSOR.replace("2", "5")}}}', "w", lambda saved: saved["w"]),
    "a dtype that torch does not have": (f'{{"w": {TENSOR.replace("32", "7")}}}', "w", lambda saved: saved["w"]),
    "a tag of another version": ('{"w": {"$set": [1]}}', "w", lambda saved: saved["w"]),
    "a part that its owner cannot take over": ('{"w": {}}', "w", lambda saved: load(saved, lambda w: w["position"])),
}


def load(saved, take):
    with saved.reading():
        take(saved["w"])


@pytest.mark.parametrize(("text", "name", "read"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_the_program_cannot_read_names_the_checkpoint(text, name, read, make, tmp_path):
    message = (
        rf"^the checkpoint {re.escape(str(tmp_path))} has another content .* \(.+\)\. .*resume=<path>.*resume=never$"
    )
    with pytest.raises(ValueError, match=message) as caught:
        read(make(text, name))
    assert len(str(caught.value)) < 700


def test_a_clear_error_of_a_part_stays_as_it_is(make):
    def refuse(_):
        raise ValueError("data.train has 64 rows, and had 63")

    with pytest.raises(ValueError, match=r"^data.train has 64 rows, and had 63$"):
        load(make('{"w": {}}'), refuse)
