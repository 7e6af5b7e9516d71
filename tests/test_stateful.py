"""The protocol of what a checkpoint saves."""

from torch.distributed.checkpoint.stateful import Stateful as TorchStateful

from rft.stateful import Stateful, load_states, states


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class OnlySaves:
    def state_dict(self):
        return {}


def test_parts_are_saved_and_restored_by_their_keys():
    parts = {"a": Counter(), "b": Counter()}
    parts["a"].count, parts["b"].count = 3, 5
    saved = states(parts)
    assert saved == {"a": {"count": 3}, "b": {"count": 5}}
    others = {"b": Counter()}
    load_states(others, saved)
    assert others["b"].count == 5


def test_the_methods_are_those_of_torch():
    for kind in (Stateful, TorchStateful):
        assert isinstance(Counter(), kind) and not isinstance(OnlySaves(), kind)
