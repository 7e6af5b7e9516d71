"""Composes a config in this process."""

from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rft.main import CONFIG_FOLDER


def compose_config(overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved config of a command line, as plain containers."""
    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        whole: Any = OmegaConf.to_container(compose("main", list(overrides)), resolve=True)
    whole.pop("hydra", None)
    return whole
