"""Finds the origin of the values of a config: the command line, a file, or another value."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rft.logger.redact import public_config, resolve
from rft.train.folder.resume import leaves

PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Origin:
    """A value that differs from the default run.

    Attributes:
        key: its key in the config.
        value, default: as written in yaml; the default is empty if the default run has no such key.
        source: `command line`, a file, or the `${key}` that the value interpolates.
    """

    key: str
    value: str
    default: str
    source: str


def origins(loader: ConfigLoader, name: str, overrides: Sequence[str]) -> list[Origin]:
    """The values of a composed config that differ from the default run, in the order of the config.

    Args:
        loader: with the search path of the config.
        name: of the composed config.
        overrides: of the command line.
    """
    config = loader.load_configuration(name, list(overrides), RunMode.RUN)
    plain = loader.load_configuration("main", [], RunMode.RUN)
    parts = loader.compute_defaults_list(name, list(overrides), RunMode.RUN)
    setters: list[tuple[str, bool, str]] = []  # (key, whether it is an empty node, source), in the order of composition
    for part in parts.defaults:
        files = [Path(source.path) / f"{part.config_path}.yaml" for source in loader.get_sources()]
        for file in [file for file in files if file.is_file()][:1]:
            setters += [(key, empty, _short_path(file)) for key, empty in _keys(file, part.package or "")]
    setters += [(str(override.key_or_group), False, "command line") for override in parts.config_overrides]
    values, defaults = _public_tree(config), _public_tree(plain)
    texts = dict(leaves(_text_tree(plain)))
    changed = []
    for key, text in leaves(_text_tree(config)):
        value, before = _value_text(values, key), _value_text(defaults, key)
        if value != before:
            follows = isinstance(text, str) and "${" in text and texts.get(key) == text
            sources = [
                source
                for set_key, empty, source in setters
                if key == set_key or (not empty and key.startswith(f"{set_key}."))
            ]
            changed.append(Origin(key, value, before, text if follows else sources[-1]))
    return changed


def _public_tree(config: DictConfig) -> dict[str, Any]:
    return public_config(resolve(OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])))


def _text_tree(config: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "hydra"}


def _keys(file: Path, package: str) -> list[tuple[str, bool]]:
    """The keys of a config that a file sets, and whether each is an empty node, which overrides nothing below it."""
    body = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(body, dict)
    values = leaves({name: node for name, node in body.items() if name != "defaults"}, package)
    return [(key, value == {}) for key, value in values]


def _value_text(tree: Any, key: str) -> str:
    """The value of a key; empty if there is no such key."""
    for name in key.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return ""
        tree = tree[name]
    return tree if isinstance(tree, str) else json.dumps(tree)


def _short_path(file: Path) -> str:
    """The path of a file: relative to the parent of the package, or to the working directory."""
    root = PACKAGE.parent if file.is_relative_to(PACKAGE) else Path.cwd()
    return str(file.relative_to(root)) if file.is_relative_to(root) else str(file)
