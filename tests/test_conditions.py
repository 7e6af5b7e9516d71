"""Options that state when they are read."""

from dataclasses import dataclass
from typing import Annotated

from rft.conditions import ReadIf, ReadWith, unread_options
from rft.ranges import Range
from rft.registry import take


@dataclass
class Inner:
    kind: str
    slope: Annotated[float, Range(low=0), ReadIf("kind", "linear", "cosine")]


@dataclass
class Outer:
    count: int
    python: Annotated[str | None, ReadIf("count")]
    top_p: Annotated[float, ReadWith("sampled texts"), Range(high=1)]
    inner: Inner


def options(count=0, kind="constant"):
    return take(
        {"count": count, "python": None, "top_p": 0.5, "inner": {"kind": kind, "slope": 1.0}}, Outer, "k", "Outer"
    )


def test_a_value_of_another_option_decides():
    assert unread_options(Outer, options(), "k", lambda part: "") == {
        "k.python": "k.count=0",
        "k.inner.slope": "k.inner.kind=constant",
    }
    assert unread_options(Outer, options(2, "cosine"), "", lambda part: "") == {}


def test_an_absent_part_decides():
    absent = {"sampled texts": "nothing is sampled"}
    found = unread_options(Outer, options(2, "linear"), "", lambda part: absent.get(part, ""))
    assert found == {"top_p": "nothing is sampled"}


def test_a_range_beside_a_condition_holds():
    for name, value in (("top_p", 1.5), ("slope", -1.0)):
        node = {"count": 1, "python": None, "top_p": 0.5, "inner": {"kind": "x", "slope": 0.0}}
        (node if name in node else node["inner"])[name] = value
        try:
            take(node, Outer, "k", "Outer")
        except ValueError as error:
            assert f"{name}={value}: it must be" in str(error)
        else:
            raise AssertionError(name)
