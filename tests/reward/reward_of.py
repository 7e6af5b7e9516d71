"""Builds rewards from nodes as the yaml has them."""

from typing import Any

from rft.registry import take
from rft.reward.compose import WeightedSum
from tests.helpers import yaml_options


def reward_of(terms: dict[str, dict[str, Any]], accuracy: str, **changes: Any) -> WeightedSum:
    """A reward with the defaults of the yaml."""
    options = {**yaml_options("reward/_base.yaml"), "terms": terms, "accuracy": accuracy, **changes}
    return WeightedSum(**take(options, WeightedSum, "reward", "a reward"))
