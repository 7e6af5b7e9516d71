"""The option files of rft/config: their values, and the comments beside their keys."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

import rft

CONFIG = Path(rft.__file__).parent / "config"
PACKAGE = re.compile(r"# @package (\S+)\n")
# Groups whose options stand elsewhere than under the name of the group.
PLACES = {"": "", "data/rows": "data.train", "actor/head": "actor", "data/question": "data.train.question"}


@dataclass(frozen=True, eq=False)
class OptionFile:
    """An option of a group.

    Attributes:
        group: such as `algorithm/loss`; empty for the root.
        name: of the option.
        key: of the node that it fills, such as `algorithm.loss`; empty for the root.
        own: its body as plain containers, interpolations unresolved.
        whole: its body on top of those of the options of its group that its defaults name.
        comments: those beside its keys, by the names of the keys from the outermost to the innermost.
    """

    group: str
    name: str
    key: str
    own: dict[str, Any]
    whole: dict[str, Any]
    comments: dict[tuple[str, ...], str]

    def __str__(self) -> str:
        return f"{self.group}={self.name}" if self.group else self.name


def option_files() -> list[OptionFile]:
    """All option files, by group and name."""
    return [_read(path) for path in sorted(CONFIG.rglob("*.yaml"))]


def _read(path: Path) -> OptionFile:
    text = path.read_text()
    group = path.parent.relative_to(CONFIG).as_posix().removeprefix(".")
    key = PLACES.get(group, group.replace("/", "."))
    if group == "modes":
        key = path.stem
    elif package := PACKAGE.match(text):
        key = package[1].removeprefix("_global_")
    tree = yaml.compose(text)
    assert isinstance(tree, yaml.MappingNode)
    found = dict(comments(tree, text.splitlines()))
    return OptionFile(group, path.stem, key, _plain(_body(path)), _plain(_whole(path)), found)


@cache
def _body(path: Path) -> DictConfig:
    body = OmegaConf.load(path)
    assert isinstance(body, DictConfig)
    return body


@cache
def _whole(path: Path) -> DictConfig:
    names = [name for name in _body(path).get("defaults", []) if isinstance(name, str) and "/" not in name]
    bases = [_whole(path.with_stem(name)) for name in names if name != "_self_"]
    whole = OmegaConf.merge(*bases, _body(path))
    assert isinstance(whole, DictConfig)
    return whole


def _plain(body: DictConfig) -> dict[str, Any]:
    found = OmegaConf.to_container(body)
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items() if name not in ("defaults", "hydra")}


def comments(
    tree: yaml.MappingNode, lines: list[str], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """(names of the keys, comment) of every key with a comment behind it, which goes on in the same column below.

    Args:
        tree: the nodes of a file, or of a mapping in it.
        lines: of the file.
        path: the keys of the mapping.
    """
    for key, value in tree.value:
        inside = (*path, str(key.value))
        block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        literal = isinstance(value, yaml.ScalarNode) and value.style == "|"
        end = key.end_mark if block or literal else value.end_mark
        start = lines[end.line].find("#", end.column)
        if start >= 0:
            rest = lines[end.line + 1 :]
            ends = (n for n, line in enumerate(rest) if line.find("#") != start or line[:start].strip())
            words = [line[start + 1 :] for line in (lines[end.line], *rest[: next(ends, len(rest))])]
            yield inside, " ".join(" ".join(words).split())
        if block and isinstance(value, yaml.MappingNode):
            yield from comments(value, lines, inside)
