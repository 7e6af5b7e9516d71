"""Builds rewards from nodes as the yaml has them."""

from collections.abc import Mapping
from typing import Any

from rft.registry import take
from rft.reward.compose import WeightedSum
from tests.helpers import yaml_options


def reward_of(terms: dict[str, dict[str, Any]], accuracy: str, **changes: Any) -> WeightedSum:
    """A reward with the defaults of the yaml."""
    options = {**yaml_options("reward/_base.yaml"), "terms": terms, "accuracy": accuracy, **changes}
    return WeightedSum(**take(options, WeightedSum, "reward", "a reward"))


def score_of(name: str, response: str, row: Mapping[str, Any], **options: Any) -> float:
    """The score that a term with the options of its yaml gives to a response, in this process."""
    node = yaml_options(f"reward/terms/{name}.yaml")[name] | {"call": {}} | options
    return float(reward_of({name: node}, name).score([response], [row]).terms[name][0])
