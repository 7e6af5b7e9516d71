"""States as JSON and tensors."""

import json
from datetime import UTC, date, datetime, time
from decimal import Decimal

import pytest
import torch

from rft.train.checkpoint.tree import join, places, split
from tests.helpers import identical

STATE = {
    "numbers": {"a": 0.1, "b": float("inf"), "c": -3, "d": True, "e": None, "text": "ü\n$"},
    "list": [1, [2.5, "x"], (3, {"y": (4,)})],
    "by number": {3: "three", 4: {"five": 5}, ("a", 1): "pair"},
    "dollar": {"$tensor": "not a tensor"},
    "fields": {
        "bytes": b"\x00\xff",
        "date": date(2026, 11, 23),
        "datetime": datetime(2026, 11, 23, 1, 2, 3, 4, UTC),
        "time": time(1, 2),
        "decimal": Decimal("0.10"),
    },
    "tensors": [torch.arange(6).view(2, 3), {"empty": torch.empty(0, 4), "half": torch.tensor([1.5]).bfloat16()}],
    "scalars": [torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), torch.tensor(True), torch.tensor(7)],
}


def test_a_state_comes_back_with_its_types():
    tree, tensors = split(STATE)
    assert sorted(tensors) == ["tensors/0", "tensors/1/empty", "tensors/1/half"]
    found = join(json.loads(json.dumps(tree)), tensors)
    assert identical(found, STATE)
    assert [tensor.dtype for tensor in found["scalars"]] == [tensor.dtype for tensor in STATE["scalars"]]
    assert isinstance(found["list"][2], tuple) and isinstance(found["list"], list)
    assert type(found["fields"]["date"]) is date and found["fields"]["decimal"].as_tuple().exponent == -2


def test_not_a_number_comes_back():
    tree, _ = split({"x": float("nan"), "y": torch.tensor(float("nan"))})
    found = join(json.loads(json.dumps(tree)), {})
    assert found["x"] != found["x"] and found["y"].isnan()


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j])
def test_what_a_checkpoint_cannot_hold_is_named_with_its_place(value):
    with pytest.raises(ValueError, match=rf"cannot hold sources/0/x, an object of the class {type(value).__name__}"):
        split({"sources": [{"x": value}]})


def test_tensors_are_loaded_where_a_template_has_them():
    template = {"a": [torch.zeros(2), {"b": torch.zeros(3)}], 7: torch.zeros(1)}
    state = {"a": [torch.ones(2), {"b": torch.ones(4), "c": torch.ones(1)}], 7: torch.ones(1)}
    tree, _ = split(state)
    found = dict(places(json.loads(json.dumps(tree)), template))
    assert found["a/0"].data_ptr() == template["a"][0].data_ptr()
    assert found["7"].data_ptr() == template[7].data_ptr()
    assert found["a/1/b"].shape == (4,), "another shape: a new tensor"
    assert found["a/1/c"].shape == (1,)
