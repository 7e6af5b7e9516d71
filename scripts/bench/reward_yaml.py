"""Rewards of the benchmarks, with the defaults of the yaml files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import rft
from rft.registry import take
from rft.reward.compose import WeightedSum


def options(file: str) -> dict[str, Any]:
    """The keys of an option file of rewards."""
    found: Any = OmegaConf.to_container(OmegaConf.load(Path(rft.__file__).parent / "config" / "reward" / file))
    return dict(found)


def build_reward(terms: Mapping[str, Mapping[str, Any]], accuracy: str, **changes: Any) -> WeightedSum:
    """A reward of these terms."""
    defaults = {name: value for name, value in options("_base.yaml").items() if name != "_target_"}
    node = {**defaults, "terms": dict(terms), "accuracy": accuracy, **changes}
    return WeightedSum(**take(node, WeightedSum, "reward", "a reward"))
