"""Keeps values of environment variables out of files.

The run uses the value of `${oc.env:NAME}`. `config.yaml`, the report and the loggers have the text `${oc.env:NAME}`
instead, and `rft.redaction` writes it in the place of the value into every message. One rule holds for all variables,
so no option has to say which of them are secrets.
"""

import os
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

from rft.redaction import hide

RESOLVER = "oc.env"


class ResolvedText(str):
    """A value of the config for which the yaml has another text: one that contains that of an environment variable,
    or the folder of a file that was converted.

    Attributes:
        source: the text of the yaml.
    """

    source: str

    def __new__(cls, value: str, source: str) -> "ResolvedText":
        made = super().__new__(cls, value)
        made.source = source
        return made

    def __reduce__(self) -> tuple[type["ResolvedText"], tuple[str, str]]:
        return ResolvedText, (str(self), self.source)


def resolve(config: DictConfig) -> dict[str, Any]:
    """Resolves a config to plain containers. Texts that an environment variable is part of are `ResolvedText`, and
    `rft.redaction` hides them and the variables from now on. A number made with `oc.decode` stays a number.

    Raises:
        OmegaConfBaseException: a value is missing, or an interpolation cannot be resolved.
    """
    used: list[str] = []

    def env(*arguments: Any) -> str | None:
        value = oc.env(*arguments)
        used.append(arguments[0])
        _hide(value, f"${{{RESOLVER}:{arguments[0]}}}", [arguments[0]])
        return value

    OmegaConf.register_new_resolver(RESOLVER, env, replace=True)
    try:
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        found = _walk(config, OmegaConf.to_container(config, resolve=False), used)
    finally:
        OmegaConf.register_new_resolver(RESOLVER, oc.env, replace=True)
    assert isinstance(found, dict)
    return found


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as it may leave the process: the text of the yaml in the place of every `ResolvedText`."""
    return {key: _public(value) for key, value in config.items()}


def _hide(value: str | None, source: str, used: list[str]) -> None:
    """Hides a value that is made of variables, unless all of them have their default."""
    if value is not None and any(name in os.environ for name in used):
        hide(value, source)


def _walk(node: DictConfig | ListConfig, texts: Any, used: list[str]) -> Any:
    """The values of a node; `texts` is the same node with its interpolations as they are written."""
    names = list(texts) if isinstance(texts, dict) else range(len(texts))
    found = {name: _value(node, name, texts[name], used) for name in names}
    return found if isinstance(texts, dict) else list(found.values())


def _value(node: DictConfig | ListConfig, name: Any, text: Any, used: list[str]) -> Any:
    if isinstance(text, dict | list):
        return _walk(node[name], text, used)
    used.clear()
    value = node[name]
    if not OmegaConf.is_config(value):
        return _mark(value, text, used) if used else value
    if used:  # `oc.decode` made it
        return _mark(OmegaConf.to_container(value, resolve=True), text, used)
    return _walk(value, OmegaConf.to_container(value, resolve=False), used)


def _mark(value: Any, source: str, used: list[str]) -> Any:
    """The value with every text in it as an `ResolvedText` of this source."""
    if isinstance(value, dict):
        return {name: _mark(below, source, used) for name, below in value.items()}
    if isinstance(value, list):
        return [_mark(below, source, used) for below in value]
    if not isinstance(value, str):
        return value
    _hide(value, source, used)
    return ResolvedText(value, source)


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _public(below) for name, below in value.items()}
    if isinstance(value, list):
        return [_public(below) for below in value]
    return value.source if isinstance(value, ResolvedText) else value
