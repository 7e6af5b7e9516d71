"""The reference of the keys: it is current, it has every key, and it says what code and yaml say."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from reference.docstrings import refers, sentences, summary  # noqa: E402
from reference.options import REGISTRIES, dataclass_of, nodes, parameters, takers  # noqa: E402
from reference.page import PAGE, page, words  # noqa: E402
from reference.words import condition, kind, value  # noqa: E402
from reference.yaml_files import comments, option_files  # noqa: E402

from rft.conditions import SAMPLED, ReadIf, ReadWith  # noqa: E402
from rft.ranges import PositiveFloat, PositiveInt, Range  # noqa: E402

# Options of nodes that the option of another group names.
OF_OTHERS = {"actor.tokenizer.alphabet", "reward.terms.choice.markers", "reward.terms.math.markers"}


def leaves(node: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(node, Mapping):
        return [path]
    return [leaf for name, below in node.items() for leaf in leaves(below, (*path, str(name)))]


@pytest.mark.slow
def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python scripts/atlas.py pages"


@pytest.mark.slow
def test_something_takes_every_key_of_the_option_files() -> None:
    untaken = set()
    for file in option_files():
        taken: dict[tuple[str, ...], set[str]] = {}
        for owner, _, _, path in takers(file):
            taken.setdefault(path, {"_target_", "name"}).update(parameters(owner))
        for leaf in leaves(file.whole):
            depth = max((n for n in range(len(leaf)) if leaf[:n] in taken), default=None)
            if depth is None or leaf[depth] not in taken[leaf[:depth]]:
                untaken.add(".".join(filter(None, (file.key, *leaf))))
    assert untaken == OF_OTHERS


@pytest.mark.slow
def test_every_key_and_every_registered_function_has_words() -> None:
    found = nodes()
    silent = []
    for node in found:
        texts = words(node.owner)
        for option, annotation in parameters(node.owner, node.keys[0]).items():
            follows = all("${" in str(content) for content in node.values.get(option, {"": ""}).values())
            below = annotation is Any or dataclass_of(annotation) is not None or not node.keys[0]
            if not (texts.get(option) or node.comments.get(option) or follows or below):
                silent.append(f"{node.keys[0]}.{option}")
    assert silent == [], "say in the docstring of its class, or in the yaml, what it means"
    owners = {node.owner for node in found}
    for registry in REGISTRIES.values():
        functions = [registry.function(name) for name in registry.names()]
        own = [function for function in functions if function.__module__.startswith("rft.")]
        assert [function for function in own if parameters(function) and function not in owners] == []


class Base:
    """A base.

    Args:
        one, two: numbers
            of two lines.
        three: see the attribute.

    Attributes:
        three: the third.
    """


class Derived(Base):
    """Another one, of
    two lines.

    More of it.

    Args:
        one: another meaning.
        two: see `Base`.
        four: as in `Somewhere`.
    """


@dataclasses.dataclass
class Silent:
    number: int


def test_a_class_takes_the_words_of_its_bases_and_its_own_come_first() -> None:
    found = {
        "one": "another meaning.",
        "two": "numbers of two lines.",
        "three": "the third.",
        "four": "as in `Somewhere`.",
    }
    assert sentences(Derived) == found
    assert [name for name, text in found.items() if refers(text)] == ["four"]
    assert summary(Derived) == "Another one, of two lines." and summary(Silent) == "" and sentences(Silent) == {}


class WithOptions:
    """Its options are an object of a dataclass."""

    Options = Silent

    def __init__(self, context: Any, options: Silent) -> None:
        self.options = options


class WithParameters:
    """Its options are parameters."""

    def __init__(self, context: Any, number: int) -> None:
        self.number = number


def function(batch: Any, *, all_sum: Any, number: int) -> int:
    return number


def test_the_options_of_a_class_are_a_dataclass_or_its_parameters() -> None:
    for owner in (WithOptions, WithParameters, function):
        assert parameters(owner) == {"number": int}


def test_types_ranges_and_conditions_in_words() -> None:
    assert kind(PositiveInt) == "whole number, at least 1" and kind(PositiveFloat | None) == "number, above 0 or null"
    assert kind(Annotated[float, Range(low=0, high=1)]) == "number, 0 to 1"
    assert kind(Literal["a", "b"] | list[str]) == "`a` or `b` or list of text"
    assert kind(dict[str, Any]) == "mapping" and kind(Any) == "" and kind(Silent | None) == "Silent or null"
    read = Annotated[PositiveInt, ReadIf("samples"), ReadWith(SAMPLED)]
    assert condition(read) == "Read only with `samples` and sampled texts."
    assert (
        condition(Annotated[int, ReadIf("schedule", "linear", "cosine")])
        == "Read only with `schedule=linear or cosine`."
    )
    assert condition(int) == ""


def test_values_are_those_of_yaml_on_one_line() -> None:
    assert [value(content) for content in (None, True, 1.0, "a b", "", "a\n", ["x"], float("inf"))] == [
        "null", "true", "1.0", "a b", '""', '"a\\n"', '["x"]', ".inf"
    ]  # fmt: skip
    assert value("x" * 100) == "x" * 70 + "..."


def test_comments_belong_to_the_key_of_their_line_and_go_on_below_it() -> None:
    text = (
        "# of the file\n"
        "one: '#'   # the first,\n"
        "           # in two lines\n"
        "two:  # a mapping\n"
        "  three: [1, 2]  # a list\n"
        "# of nothing\n"
        "  four: |-  # a text\n"
        "    a # of it\n"
    )
    assert dict(comments(yaml.compose(text), text.splitlines())) == {
        ("one",): "the first, in two lines",
        ("two",): "a mapping",
        ("two", "three"): "a list",
        ("two", "four"): "a text",
    }
