"""The keys that the user typed: on the command line, and in the yaml file that `-cn` names."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

PACKAGE_ONLY = ("defaults", "hydra")


def typed_keys() -> dict[str, str]:
    """Where each key was typed, by its dotted name: empty for the command line, else the file.

    Outside Hydra, as in a test that composes a config itself, nothing was typed.
    """
    if not HydraConfig.initialized():
        return {}
    job = HydraConfig.get()
    places: dict[str, str] = {}
    for source in job.runtime.config_sources:
        file = Path(source.path) / f"{str(job.job.config_name).removesuffix('.yaml')}.yaml"
        if source.provider == "command-line" and file.is_file():
            body = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
            assert isinstance(body, dict)
            kept = {name: value for name, value in body.items() if name not in PACKAGE_ONLY}
            places |= dict.fromkeys(without_whole_nodes(leaves(kept, "")), str(file))
    return places | dict.fromkeys(override_keys(typed_overrides()), "")


def typed_overrides() -> list[str]:
    """The overrides of the command line as they were typed: `key=${oc.env:NAME}`, not with the variable's value."""
    overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(overrides, list)
    return list(map(str, overrides))


def override_keys(overrides: Sequence[str]) -> list[str]:
    """The keys that overrides of the command line set. A group counts as the key of its node."""
    keys: list[str] = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_delete():
            key = (override.package or override.key_or_group).replace("/", ".")
            value = override.value()
            keys += leaves(value, key) if isinstance(value, dict) else [key]
    return without_whole_nodes(keys)


def leaves(node: object, key: str) -> Iterator[str]:
    """The dotted keys of the values of a node."""
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name}".lstrip("."))
    else:
        yield key


def without_whole_nodes(keys: Iterator[str] | list[str]) -> list[str]:
    """The keys without those of nodes that are typed with their `_target_`: such a node must have all its options."""
    keys = list(keys)
    whole = [re.sub(r"_target_$", "", key) for key in keys if key.endswith("._target_")]
    return [key for key in keys if not key.startswith(tuple(whole))] if whole else keys
