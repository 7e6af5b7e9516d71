"""What the strategy decides on this machine is written into the config, before other keys take its value over."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rft.distributed import device_kind
from rft.registry import Target
from rft.strategy.base import StrategyOptions
from rft.train.folder.run_folder import AUTO, read_config


def settle(config: DictConfig) -> dict[str, str]:
    """Replaces options of the strategy that leave a choice, such as `dtype=auto`, by what is chosen.

    A run that this command continues keeps its choice, also on another machine.

    Args:
        config: of a command, composed; changed in place. A mistake in the node of the strategy is left for the checks
            of the whole config.

    Returns:
        The options that were replaced, each with a line for the user, such as `strategy.dtype=auto: bfloat16`; an empty
        one if this machine has no GPU and the run none before, for which there is one choice.
    """
    node: Any = OmegaConf.to_container(config.strategy, resolve=True)
    try:
        options = Target(node, "strategy").options
    except ValueError:
        return {}
    if not isinstance(options, StrategyOptions):
        return {}
    found, lines = options.settled(), dict[str, str]()
    before = _continued(config) if found else {}
    for name, chosen in found.items():
        same = before.get("_target_") == node["_target_"] and name in before
        value, why = (before[name], ", as the run in output_dir") if same else (chosen, "")
        config.strategy[name] = value
        told = device_kind(AUTO) == "cuda" or value != chosen
        lines[name] = f"strategy.{name}={node[name]}: {value}{why}" if told else ""
    return lines


def _continued(config: DictConfig) -> Mapping[str, Any]:
    """The node of the strategy of the run in the folder that the config names; empty if it is not to be continued."""
    saved = read_config(Path(config.output_dir)) if config.resume == AUTO else None
    found = {} if saved is None else saved.get("strategy")
    return found if isinstance(found, Mapping) else {}
