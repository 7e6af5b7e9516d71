"""The text of docs/reference.md."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from itertools import groupby
from typing import Any

from reference.atlas_tables import mark, table
from reference.docstrings import refers, sentences, summary
from reference.options import Node, nodes, parameters
from reference.words import condition, kind, value
from reference.yaml_files import CONFIG, OptionFile
from rft.registry import options_class
from rft.setup.schema import root_with_roles

PAGE = CONFIG.parents[1] / "docs" / "reference.md"
HEAD = """# Reference of the keys

Every key of the config: its type and range, its value in the option files of `rft/config`, and what it means.
`python scripts/atlas.py pages` writes this page from signatures, docstrings and yaml files.

A value that stands alone is that of every option that sets the key; otherwise each value names its options. What a
run does not read (*read only with*) may not be set. [The config tree](config.md) says how options make a config.
"""


def page() -> str:
    """The whole page: a section for every key of the root, in its order, with a table for all that takes options."""
    order = ["", *(field.name for field in fields(root_with_roles()))]
    found = sorted(nodes(), key=lambda node: (order.index(_root(node)), node.keys[0]))
    keys = {key for node in found for key in node.keys}
    parts = [HEAD]
    for root, nodes_of_root in groupby(found, key=_root):
        parts.append(f"## {f'`{root}`' if root else 'Root keys'}\n")
        for key, nodes_of_key in groupby(nodes_of_root, key=lambda node: node.keys[0]):
            parts += [f"### `{key}`\n"] if key != root else []
            parts += [_part(node, keys) for node in nodes_of_key]
    return "\n".join(parts)


def _root(node: Node) -> str:
    return node.keys[0].split(".")[0]


def _part(node: Node, keys: Collection[str]) -> str:
    """What takes a node: its name, the options that name it, the first paragraph of its docstring, and a table.

    Args:
        keys: of all nodes, which the table of the root leaves out.
    """
    options = ", ".join(f"`{_label(file, node.named_by)}`" for file in node.named_by)
    lead = f"**`{node.name or node.owner.__name__}`**" + (f" ({options})" if options else "")
    lines = [f"{lead}: {mark(summary(node.owner))}\n"]
    if len(node.keys) > 1:
        lines.append(f"Also {', '.join(f'`{key}`' for key in node.keys[1:])}.\n")
    taken = parameters(node.owner, node.keys[0])
    rows = [_row(node, option, kinds) for option, kinds in taken.items() if node.keys[0] or option not in keys]
    return "\n".join([*lines, *([table(["key", "type", "value", "meaning"], rows) + "\n"] if rows else [])])


def _row(node: Node, option: str, annotation: Any) -> list[str]:
    key = f"`{'.'.join(filter(None, (node.keys[0], option)))}`"
    values = {file: f"`{value(content)}`" for file, content in node.values.get(option, {}).items()}
    own = {file: text for file, text in values.items() if option != "name" or text != f"`{file.name}`"}
    comments = _grouped(node.comments.get(option, {}), len(values))
    text = words(node.owner).get(option, "").replace("None", "null")
    texts = [*([] if comments and refers(text) else [text]), *comments, condition(annotation)]
    meaning = " ".join(map(_sentence, filter(None, texts)))
    return [key, mark(kind(annotation)), mark("; ".join(_grouped(own, len(own)))), mark(meaning)]


def words(owner: Any) -> dict[str, str]:
    """What the docstrings of a class or function, and of the dataclass of its options, say about each option."""
    taker = options_class(owner)
    return sentences(owner) if taker is None else sentences(owner) | sentences(taker)


def _grouped(texts: Mapping[OptionFile, str], count: int) -> list[str]:
    """Texts of option files, each once, with the names of its options unless it holds for all.

    Args:
        count: of the option files; a text of one that others build on holds for all.
    """
    names: dict[str, list[str]] = {}
    for file, text in texts.items():
        names.setdefault(text, []).append(f"`{_label(file, texts)}`")
    holds = len(texts) == count or any(file.name.startswith("_") for file in texts)
    return list(names) if len(names) == 1 and holds else [f"{', '.join(some)}: {text}" for text, some in names.items()]


def _label(file: OptionFile, files: Iterable[OptionFile]) -> str:
    """The name of an option; with its group where the files are of several groups."""
    return file.name if len({other.group for other in files} | {""}) <= 2 else str(file)


def _sentence(text: str) -> str:
    """A text with a full stop, and with a capital unless it begins with a value or a symbol (`null: no limit`)."""
    word = text.split(" ")[0].rstrip(",.;")
    capital = word.isalpha() and (len(word) > 1 or word == "a")
    return (f"{text[:1].upper()}{text[1:]}" if capital else text) + ("" if text.endswith(".") else ".")
