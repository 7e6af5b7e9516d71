"""Renamed keys, groups and options: the old name is an error that names the new one."""

import re
from collections.abc import Mapping
from typing import Any

KEYS = {
    "data.trains": "data.train_on",
    "after": "depends_on",
    "algorithm.resample_power": "algorithm.pick={name: resample, power: <number>}",
}
GROUPS = {
    "rollout/sampling": "the keys of rollout itself, such as rollout.temperature",
    "rollout/engine/servers": "the keys of rollout.engine.servers",
    **{f"actor@{role}": f"the group {role}, as in {role}={role}" for role in ("reference", "critic", "prm")},
    "actor@teacher": "the group teacher, as in teacher=teacher_server",
}
OPTIONS = {
    "algorithm/source=partly_sampled": "algorithm/source=mixed",
    "algorithm/source=retiring": "algorithm/source=drop_solved",
    "algorithm/source=dynamic": "algorithm/source=dynamic_sampling",
    "algorithm/source=dynamic_middle": "algorithm/source=dynamic_sampling_medium",
    "rollout/first_token=hot": "rollout/first_token=high_temperature",
    **{f"actor={role}": f"{role}={role}, a group of its own" for role in ("reference", "critic", "prm", "teacher")},
    "actor=teacher_server": "teacher=teacher_server, a group of its own",
}


def renamed_key(key: str) -> str | None:
    """The message for an old key, or for one below it; None for any other."""
    for old, new in KEYS.items():
        if key == old or key.startswith(f"{old}."):
            return f"{key}: {old} is called {new} now"
    return None


def renamed_group(group: str) -> str | None:
    """The message for a group that is gone; None for any other.

    Args:
        group: as the command line writes it, with its package ("actor@teacher") where it has one.
    """
    return f"{group}: this group was removed; use {GROUPS[group]}" if group in GROUPS else None


def renamed_option(group: str, option: str) -> str | None:
    """The message for an old option of a group; None for any other."""
    chosen = f"{group}={option}"
    if group == "algorithm/correction" and (found := re.fullmatch(r"bypass_(\w+)", option)):
        return f"{chosen} is algorithm/correction={found[1]} algorithm.correction.anchor=rollout now"
    return f"{chosen} is called {OPTIONS[chosen]} now" if chosen in OPTIONS else None


def renamed_keys(config: Mapping[str, Any]) -> list[str]:
    """The message for every old key in a resolved config."""
    found = []
    for old in KEYS:
        node: Any = config
        for name in old.split("."):
            node = node[name] if isinstance(node, Mapping) and name in node else None
        if node is not None:
            found.append(f"{old}: it is called {KEYS[old]} now")
    return found
