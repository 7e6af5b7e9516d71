"""Ranges of numbers, and that every number of the config has one."""

import dataclasses
import importlib
import inspect
import math
import re
import typing
from pathlib import Path
from typing import Annotated, Literal

import pytest

import rft
from rft import algorithm
from rft.data.rows.schemas import SCHEMAS
from rft.ranges import Fraction, PositiveFloat, PositiveInt, Range
from rft.registry import Registry, convert, spell
from rft.reward import REWARDS
from rft.setup.schema import Run
from rft.train.schedules import SCHEDULES

CONFIG = Path(rft.__file__).parent / "config"
TABLES = [table for table in vars(algorithm).values() if isinstance(table, Registry)]
# Options that may be any finite number, or whose bounds depend on other options.
WITHOUT_RANGE = {
    "DynamicSampling.between": "any scores; the first is the lower",
    "Rule.high": "the metric decides",
    "Rule.low": "the metric decides",
    "ScoreMoments.mean": "the mean of any scores",
    "TurnRewards.weight": "any weight",
    "Warmup.stop_at": "any metric",
    "loss clip_cov.cov_high": "any covariance",
    "loss clip_cov.cov_low": "any covariance",
    "loss two_sided.delta": "above 1 + clip_low, which is another option",
    "shaping clip_scores.high": "any score above `low`",
    "shaping clip_scores.low": "any score",
    **{
        f"shaping cosine_length.{name}": "any score"
        for name in ("right_short", "right_long", "wrong_short", "wrong_long", "at_limit")
    },
    "shaping truncated.factor": "any number",
    "shaping truncated.offset": "any score",
}


@pytest.mark.parametrize(
    ("bounds", "number", "broken"),
    [
        (Range(low=0, high=1), 0, ""),
        (Range(low=0, high=1), 1.0, ""),
        (Range(low=0, high=1), -1e-9, "at least 0"),
        (Range(low=0, high=1), 1.5, "at most 1"),
        (Range(above=0, below=1), 0.0, "above 0"),
        (Range(above=0, below=1), 1.0, "below 1"),
        (Range(above=0), 1e-300, ""),
        (Range(), math.nan, "finite"),
        (Range(low=0), math.inf, "finite"),
        (Range(low=0, infinite=True), math.inf, ""),
        (Range(low=0, infinite=True), -math.inf, "at least 0"),
        (Range(low=0, infinite=True), math.nan, "finite"),
        (Range(), 10**400, "finite"),
        (Range(low=1, hint="0 is for never"), 0, "at least 1; 0 is for never"),
    ],
)
def test_the_bound_that_a_number_breaks(bounds, number, broken):
    assert bounds.broken(number) == broken


def signatures():
    """Every function of the registries and every class of the config tree, with the dataclasses in their options."""
    found = {}

    def add(name, owner, hints):
        found[name] = hints
        for annotation in hints.values():
            for part in (annotation, *typing.get_args(annotation)):
                if dataclasses.is_dataclass(part) and isinstance(part, type) and part.__name__ not in found:
                    add(part.__name__, part, typing.get_type_hints(part, include_extras=True))

    add("Run", Run, typing.get_type_hints(Run, include_extras=True))
    targets = {
        name for file in CONFIG.rglob("*.yaml") for name in re.findall(r"_target_: (rft[.\w]+)", file.read_text())
    }
    for target in sorted(targets):
        module, _, name = target.rpartition(".")
        made = vars(importlib.import_module(module))[name]
        made = getattr(made, "Options", made)
        hints = typing.get_type_hints(made.__init__ if isinstance(made, type) else made, include_extras=True)
        hints.pop("context", None)
        add(name, made, hints)
    for table in (*TABLES, SCHEMAS, REWARDS, SCHEDULES):
        for name in table.names():  # what is supplied at call time is no option
            function = table.function(name)
            called = function.__init__ if isinstance(function, type) else function
            hints = typing.get_type_hints(called, include_extras=True)
            options = {p.name for p in inspect.signature(called).parameters.values() if p.kind is p.KEYWORD_ONLY}
            options -= set(table.supplied)
            add(f"{table.kind} {name}", function, {key: hints[key] for key in options if key in hints})
    return found


def is_bare(annotation):
    """A number without a range in it."""
    if typing.get_origin(annotation) is Annotated:
        return False
    return annotation in (int, float) or any(map(is_bare, typing.get_args(annotation)))


def test_every_number_of_the_config_has_a_range_or_is_listed():
    bare = {f"{name}.{key}" for name, hints in signatures().items() for key, kind in hints.items() if is_bare(kind)}
    assert bare - set(WITHOUT_RANGE) == set(), "state the range with the type, as in rft/ranges.py"
    assert set(WITHOUT_RANGE) - bare == set(), "these have one now: take them out of the list"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clip": 0.0, "tau": 0.1}, None),
        ({"clip": 1, "tau": 9e9}, None),
        ({"clip": None, "tau": 0.1}, None),
        ({"clip": -0.1, "tau": 0.1}, "clip=-0.1: it must be at least 0"),
        ({"clip": 1.1, "tau": 0.0}, "clip=1.1: it must be at most 1"),
        ({"clip": 0.5, "tau": 0.0}, "tau=0.0: it must be above 0"),
        ({"clip": 0.5, "tau": float("nan")}, "tau=nan: it must be finite"),
        ({"clip": 0.5, "tau": float("inf")}, "tau=inf: it must be finite"),
        ({"clip": True, "tau": 1.0}, "clip: expected number, got True"),
        ({"clip": "0.5", "tau": 1.0}, "clip: expected number, got '0.5'"),
    ],
)
def test_options_out_of_their_range_are_refused_by_key(options, said):
    def bounded(logprobs, *, clip: Fraction | None, tau: PositiveFloat): ...

    registry = Registry("loss")
    registry.register("bounded")(bounded)
    if said is None:
        assert registry.build({"name": "bounded", **options}, "algorithm.loss").options == options
        return
    with pytest.raises(ValueError) as caught:
        registry.build({"name": "bounded", **options}, "algorithm.loss")
    assert said in str(caught.value) and str(caught.value).startswith("algorithm.loss.")


def test_a_list_of_fixed_length():
    betas = tuple[Annotated[float, Range(low=0, below=1)], PositiveInt]
    assert convert([0.9, 3], betas, "k") == (0.9, 3)
    for value, said in (
        ([0.9], r"^k: expected \[number, whole number\], got \[0\.9\]$"),
        ([0.9, 3, 4], r"^k: expected \[number, whole number\], got "),
        ([1.0, 3], r"^k\[0\]=1\.0: it must be below 1$"),
        ([0.9, 0], r"^k\[1\]=0: it must be at least 1$"),
    ):
        with pytest.raises(ValueError, match=said):
            convert(value, betas, "k")


def test_a_number_of_no_stated_range_is_finite():
    assert convert(-1e300, float, "k") == -1e300
    for value in (float("nan"), float("-inf"), 10**400):
        with pytest.raises(ValueError, match=r"^k=.*: it must be finite$"):
            convert(value, float, "k")


def test_spell():
    assert spell(float | None) == "number or null"
    assert spell(Literal["a", "b"]) == "a or b"
    assert spell(Literal["auto", "never"] | str) == "auto or never or text"
    assert spell(Range) == "Range"
