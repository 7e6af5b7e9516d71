"""A state whose content is not what the program reads is one error that names the checkpoint."""

import json
import re
from decimal import Decimal

import pytest
import torch
from safetensors.torch import save_file

from rft.train.checkpoint.manifest import write_manifest
from rft.train.checkpoint.saved_state import STRUCTURE, SavedState, structure_of
from rft.train.checkpoint.tree import split

TENSOR = '{"$tensor": "w", "dtype": "float32", "shape": [2]}'


@pytest.fixture
def make(tmp_path):
    """A checkpoint with a state of this text, a tensor of this name and these facts in its manifest."""

    def write(text, name="w", **facts):
        (tmp_path / "state.json").write_text(text)
        save_file({name: torch.ones(2)}, tmp_path / "model.safetensors")
        write_manifest(tmp_path, {}, {"step": 3, "metric": None, **facts})
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
    "a number that its dtype cannot hold": ('{"w": {"$number": 300, "dtype": "uint8"}}', "w", lambda saved: saved["w"]),
    "bytes that are none": ('{"w": {"$bytes": "x"}}', "w", lambda saved: saved["w"]),
    "a day that is none": ('{"w": {"$date": "2001-02-30"}}', "w", lambda saved: saved["w"]),
    "a decimal that is none": ('{"w": {"$decimal": "x"}}', "w", lambda saved: saved["w"]),
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


STATE = {
    "step": 3,
    "stage_done": False,
    "numbers": {"loss": 0.5, "kl/ref": float("nan")},
    "ledger": {"train": {"trained": [[0, 7]], "waiting": []}},
    "source": {"position": 8, "surplus": [[{"group": torch.tensor(7), "fields": {"prompt": "1 + 1", "answer": None}}]],
               "price": (Decimal("0.1"), b"x")},
}  # fmt: skip
REFUSED = {
    "a text as the position": ("source", lambda state: state["source"].update(position="8")),
    "a number in the ledger": ("ledger", lambda state: state["ledger"]["train"].update(waiting=3)),
    "null as a number": ("numbers", lambda state: state["numbers"].update(loss=None)),
    "0 in place of false": ("stage_done", lambda state: state.update(stage_done=0)),
    "an integer in place of 0.5": ("numbers", lambda state: state["numbers"].update(loss=1)),
    "a number without its entry": ("numbers", lambda state: state["numbers"].pop("loss")),
    "one more range": ("ledger", lambda state: state["ledger"]["train"]["trained"].append([9, 9])),
    "a part that is missing": ("step", lambda state: state.pop("step")),
    "a part that is new": ("more", lambda state: state.update(more=1)),
}


@pytest.mark.parametrize(("part", "edit"), REFUSED.values(), ids=REFUSED)
def test_an_edited_state_with_other_types_or_entries_names_the_part(part, edit, make):
    tree, _ = split(STATE)
    facts = {STRUCTURE: structure_of(tree)}
    make(json.dumps(tree), **facts)
    edit(tree)
    message = rf"another content .*TypeError: {part}: a value has another type, or an entry is missing or new"
    with pytest.raises(ValueError, match=message):
        make(json.dumps(tree), **facts)


def test_another_value_of_the_same_type_is_read(make):
    tree, _ = split(STATE)
    facts = {STRUCTURE: structure_of(tree)}
    tree["source"]["position"], tree["numbers"]["kl/ref"] = 9, 0.25
    saved = make(json.dumps(tree), **facts)
    assert (saved["source"]["position"], saved["numbers"]["kl/ref"]) == (9, 0.25)
