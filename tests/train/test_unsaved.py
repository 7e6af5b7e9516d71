"""Plugins that remember steps without a `state_dict` are named."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from rft.reward import REWARDS
from rft.reward.build import Rule
from rft.train.unsaved import UnsavedMemory

HISTORY: list[float] = []
SEEN = {"steps": 0}
CONSTANT = [1.0, 2.0]
UNUSED: list[float] = []


def helper(value):
    SEEN["steps"] += 1
    return value * CONSTANT[0] * math.pi


def remembers(scores):
    HISTORY.append(helper(scores))
    return HISTORY[-1]


def forgets(scores):
    UNUSED_HERE = [scores]
    return UNUSED_HERE[0] * CONSTANT[1]


def counts():
    number = 0

    def advantage(scores):
        nonlocal number
        number += 1
        return scores / number

    return advantage


class Novelty:
    def __init__(self):
        self.scale, self.ready, self.names = 2.0, False, ["a"]
        self.counts, self.mean, self.table = Counter[str](), torch.zeros(2), np.zeros(2)

    def values(self, name):
        self.ready = True  # no number
        self.counts[name] += 1
        self.mean += 1
        self.table[0] += 1


@pytest.fixture(autouse=True)
def empty():
    HISTORY.clear()
    SEEN["steps"] = 0


def changed(plugin, *calls):
    """The variables that messages name after some calls."""
    memory = UnsavedMemory({"the plugin": plugin})
    assert memory.changed() == []
    for call in calls:
        call()
    messages = memory.changed()
    assert all("no checkpoint saves it: a resumed run" in message for message in messages)
    assert memory.changed() == [], "each is named once"
    return [message.removeprefix("the plugin changes ").split(" while ")[0] for message in messages]


def test_variables_of_modules_that_a_function_and_its_helpers_use():
    assert changed(remembers, lambda: remembers(1.0)) == [
        f"the variable {__name__}.HISTORY", f"the variable {__name__}.SEEN"
    ]  # fmt: skip
    assert changed(forgets, lambda: forgets(1.0), lambda: UNUSED.append(1.0)) == []


def test_variables_of_enclosing_functions_and_attributes_of_a_function():
    advantage = counts()
    assert changed(advantage, lambda: advantage(1.0)) == [f"the variable {__name__}.number"]
    forgets.calls = 0
    assert changed(forgets, lambda: vars(forgets).update(calls=1)) == [f"the variable {__name__}.calls"]
    del forgets.calls


def test_attributes_of_an_object():
    term = Novelty()
    names = ["its attribute counts", "its attribute mean", "its attribute table"]
    assert changed(term, lambda: term.values("x")) == names
    assert changed(term) == []


def test_a_rule_of_the_reward(monkeypatch):
    monkeypatch.setattr(REWARDS, "_entries", dict(REWARDS._entries))

    @REWARDS.register("streak")
    def streak(response, row):
        return remembers(len(response))

    rule = Rule(REWARDS.build({"name": "streak"}, "reward.terms.streak"))
    assert changed(rule, lambda: rule.value("a", {})) == [
        f"the variable {__name__}.HISTORY", f"the variable {__name__}.SEEN"
    ]  # fmt: skip
