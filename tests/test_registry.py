"""Yaml nodes against signatures: every mistake is answered with the key and the cure."""

import sys
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from rft.conditions import ReadIf
from rft.errors import FunctionError
from rft.imports import import_all, import_part, import_plugin
from rft.ranges import PositiveInt
from rft.registry import Registry, Target, convert, take


@dataclass
class Inner:
    rate: float
    flag: bool


@dataclass
class Outer:
    inner: Inner
    maybe: Inner | None
    many: list[Inner]


class Thing:
    def __init__(self, world: str, size: int, name: str | None = None) -> None:
        self.world, self.size, self.name = world, size, name


class Heir(Thing):
    """Built as what it comes from."""


def make_thing(*, world: str, size: int) -> Thing:
    return Thing(world, size)


def ppo_clip(logprobs, batch, *, all_sum, clip_low: float, clip_high: float, mode: Literal["soft", "hard"]):
    return logprobs, batch, all_sum, clip_low, clip_high, mode


@pytest.fixture
def losses():
    registry = Registry("loss", supplied=("all_sum",), reads=(), head="lm")
    registry.register("ppo_clip", reads=lambda mode: (mode,))(ppo_clip)
    registry.register("nll")(lambda logprobs, batch: (logprobs, batch))
    return registry


NODE = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "mode": "soft"}
KEY = "algorithm.loss"


def test_a_plugin_binds_its_options_and_is_handed_what_it_takes(losses):
    plugin = losses.build(NODE, KEY)
    assert plugin.options == {"clip_low": 0.2, "clip_high": 0.3, "mode": "soft"}
    assert plugin("l", "b", all_sum="sum", seed=3) == ("l", "b", "sum", 0.2, 0.3, "soft")
    assert losses.build({"name": "nll"}, KEY)("l", "b", all_sum="sum", seed=3) == ("l", "b")


def test_facts_are_stated_computed_from_options_or_the_default(losses):
    assert losses.names() == ["nll", "ppo_clip"] and losses.function("ppo_clip") is ppo_clip
    stated, plain = losses.build(NODE, KEY).facts, losses.build({"name": "nll"}, KEY).facts
    assert (stated.reads, stated.head) == (("soft",), "lm")
    assert (plain.reads, plain.head) == ((), "lm")


def test_a_fault_is_told_before_other_facts_are_computed():
    def fault(low, high):
        return None if low < high else f"low={low}: it must be below high={high}"

    def scaled(logprobs, *, low: float, high: float): ...

    registry = Registry("loss", reads=())
    registry.register("scaled", reads=lambda high, low: (f"by_{1 / (high - low)}",), fault=fault)(scaled)
    assert registry.build({"name": "scaled", "low": 0.5, "high": 1.0}, KEY).facts.reads == ("by_2.0",)
    with pytest.raises(ValueError, match=f"^{KEY}.low=1.0: it must be below high=1.0$"):
        registry.build({"name": "scaled", "low": 1.0, "high": 1.0}, KEY)


def test_an_error_in_a_fact_of_a_user_names_the_fact():
    registry = Registry("loss", reads=())
    registry.register("mine", reads=lambda anchor: (anchor,))(lambda logprobs, *, mode: None)
    with pytest.raises(FunctionError, match=r"^reads of the loss 'mine' failed: .*missing .* argument: 'anchor'$"):
        registry.build({"name": "mine", "mode": "old"}, KEY)


def test_a_fact_that_the_registry_does_not_know_is_a_mistake_of_the_programmer(losses):
    with pytest.raises(
        AssertionError, match="states unknown facts \\['haed'\\]; known: \\['fault', 'head', 'reads'\\]"
    ):
        losses.register("other", haed="value")


def test_a_fact_that_is_a_function_is_called_with_what_it_takes():
    registry = Registry("loss", supplied=("seed",), functions=("prepare",), prepare=None)

    def prepare(logprobs, *, seed, clip_low):
        return logprobs, seed, clip_low

    registry.register("ppo_clip", prepare=prepare)(lambda logprobs, *, clip_low: None)
    plugin = registry.build({"name": "ppo_clip", "clip_low": 0.2}, KEY)
    assert plugin.call("prepare", "l", seed=3, all_sum="sum") == ("l", 3, 0.2)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (NODE | {"name": "ppo_clp"}, r"^algorithm\.loss\.name: no loss is called 'ppo_clp'; did you mean ppo_clip\? "),
        (
            NODE | {"name": "zzz"},
            r"no loss is called 'zzz' \(known: nll, ppo_clip; import a module of your own with plugins: \[module\]",
        ),
        (NODE | {"name": ["nll"]}, r"^algorithm\.loss\.name: no loss is called \['nll'\]"),
        (NODE | {"name": None}, r"^algorithm\.loss\.name: no loss is called None"),
        ({"clip_low": 0.2}, r"^algorithm\.loss: expected a loss as \{name: \.\.\., options\}, got \{'clip_low'"),
        ("ppo_clip", r"^algorithm\.loss: expected a loss as \{name: \.\.\., options\}, got 'ppo_clip'"),
        (
            NODE | {"clip_hgh": 1.0},
            r"^algorithm\.loss\.clip_hgh: loss 'ppo_clip' takes clip_low, clip_high, mode; did you mean clip_high\?$",
        ),
        (NODE | {"all_sum": 1}, r"^algorithm\.loss\.all_sum: loss 'ppo_clip' takes clip_low, clip_high, mode$"),
        (NODE | {"logprobs": 1}, r"^algorithm\.loss\.logprobs: loss 'ppo_clip' takes clip_low, clip_high, mode$"),
        ({"name": "nll", "x": 1}, r"^algorithm\.loss\.x: loss 'nll' takes no options$"),
        (
            {"name": "ppo_clip", "clip_low": 0.2, "mode": "soft"},
            r"^algorithm\.loss\.clip_high is missing: loss 'ppo_clip' needs it; add `clip_high: <number>`$",
        ),
        (
            NODE | {"mode": "sofd"},
            r"^algorithm\.loss\.mode: expected one of soft, hard, got 'sofd'; did you mean soft\?",
        ),
        (NODE | {"clip_low": "0.2"}, r"^algorithm\.loss\.clip_low: expected number, got '0\.2'$"),
    ],
)
def test_a_node_that_does_not_fit(losses, node, message):
    with pytest.raises(ValueError, match=message):
        losses.build(node, KEY)


def test_a_name_belongs_to_one_function(losses):
    def again():
        def nll(logprobs, batch):
            return None

        return nll

    losses.register("mine")(again())
    second = again()
    losses.register("mine")(second)  # the same place again: its file was imported anew
    assert losses.function("mine") is second
    for change in ({"__module__": "other"}, {"__qualname__": "other"}):
        third = again()
        for name, value in change.items():
            setattr(third, name, value)
        with pytest.raises(ValueError, match=r"loss 'mine' is registered twice: as .*nll and as .*other.*; give one"):
            losses.register("mine")(third)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (0.5, float, 0.5),
        (True, bool, True),
        ("a", str, "a"),
        (None, int | None, None),
        (3, int | None, 3),
        (3, float | None, 3.0),
        ("a", int | str, "a"),
        (3, int | str, 3),
        ([1, 2], list[int], [1, 2]),
        ([1, 2], list[float], [1.0, 2.0]),
        ([1, "a"], list, [1, "a"]),
        ((1, 2), tuple[int, ...], (1, 2)),
        ([], list[int], []),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ({"a": [1]}, dict, {"a": [1]}),
        ("x", Any, "x"),
        ("hard", Literal["soft", "hard"], "hard"),
        ({"rate": 1, "flag": False}, Inner, Inner(1.0, False)),
    ],
)
def test_a_value_that_fits(value, annotation, expected):
    found = convert(value, annotation, "key")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (True, int, "expected whole number, got True"),
        (False, float, "expected number, got False"),
        (1, bool, "expected true or false, got 1"),
        (0, bool, "expected true or false, got 0"),
        ("true", bool, "expected true or false, got 'true'"),
        (1.0, int, "expected whole number, got 1.0"),
        ("1", int, "expected whole number, got '1'"),
        ("1e-6", float, "expected number, got '1e-6'"),
        (None, float, "expected number, got None"),
        (1, str, "expected text, got 1"),
        (["a"], str, r"expected text, got \['a'\]"),
        ("a", int | None, "expected whole number, got 'a'"),
        (True, int | str, "expected whole number or text, got True"),
        (None, int | str, "expected whole number or text, got None"),
        ("ab", list[str], "expected .*list.*, got 'ab'"),
        (3, list[int], "expected .*list.*, got 3"),
        ([1], dict[str, int], r"expected .*dict.*, got \[1\]"),
        (3, Inner, "expected Inner, got 3"),
        ([1, 2], Literal["a"], r"expected one of a, got \[1, 2\]"),
        (True, Literal[1, 2], "expected one of 1, 2, got True"),
    ],
)
def test_a_value_that_does_not_fit(value, annotation, message):
    with pytest.raises(ValueError, match=f"^key: {message}$"):
        convert(value, annotation, "key")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": {"rate": "x", "flag": True}}, r"run\.inner\.rate: expected number, got 'x'"),
        ({"inner": {"rate": 1.0}}, r"run\.inner\.flag is missing: Inner needs it; add `flag: <true or false>`"),
        ({"inner": {"rate": 1.0, "flag": 1}}, r"run\.inner\.flag: expected true or false, got 1"),
        ({"maybe": {"rat": 1.0}}, r"run\.maybe\.rat: Inner takes rate, flag; did you mean rate\?"),
        ({"many": [{"rate": 1.0, "flag": True}, {}]}, r"run\.many\[1\]\.rate is missing"),
        ({"maybe": 5}, r"run\.maybe: expected Inner, got 5"),
    ],
)
def test_a_mistake_deep_inside_is_named_by_its_whole_key(change, message):
    good = {"inner": {"rate": 1.0, "flag": True}, "maybe": None, "many": []}
    assert Outer(**take(good, Outer, "run", "Outer")) == Outer(Inner(1.0, True), None, [])
    with pytest.raises(ValueError, match=f"^{message}"):
        take(good | change, Outer, "run", "Outer")
    with pytest.raises(ValueError, match=r"^innner: the root takes inner, maybe, many; did you mean inner\?$"):
        take({"innner": 1}, Outer, "", "the root")


def target(of, **options):
    return Target({"_target_": f"{__name__}.{of}", **options}, "actor", ("world", "seed"))


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """This file as a module that `_target_` can name, whatever pytest calls it."""
    monkeypatch.setitem(sys.modules, __name__, types.SimpleNamespace(**globals()))


@pytest.mark.parametrize("name", ["Thing", "Heir", "make_thing"])
def test_a_target_is_built_from_its_options_and_what_it_takes_of_the_rest(name):
    thing = target(name, size=3).build(world="w", seed=1)
    assert (thing.world, thing.size, thing.name) == ("w", 3, None)


@dataclass(frozen=True)
class LampOptions:
    watts: PositiveInt
    color: Annotated[str, ReadIf("watts", 60)]


class Lamp:
    Options = LampOptions

    def __init__(self, options: LampOptions, world: str) -> None:
        self.options = options
        self.world = world


class Lantern(Lamp):
    """Takes the options of its base class."""


@pytest.mark.parametrize("name", ["Lamp", "Lantern"])
def test_a_class_with_a_dataclass_of_options_gets_an_object_of_it(name):
    lamp = target(name, watts=40, color="red")
    assert lamp.options == LampOptions(watts=40, color="red")
    built = lamp.build(world="w", seed=1)
    assert (type(built).__name__, built.options, built.world) == (name, lamp.options, "w")
    assert lamp.unread(lambda part: "") == {"actor.color": "actor.watts=40"}
    assert target(name, watts=60, color="red").unread(lambda part: "") == {}


def test_options_of_a_dataclass_are_checked_in_the_name_of_their_class():
    with pytest.raises(ValueError, match=r"^actor\.wats: Lamp takes watts, color; did you mean watts\?"):
        target("Lamp", wats=1, color="red")
    with pytest.raises(ValueError, match=r"^actor\.watts=0: it must be at least 1"):
        target("Lamp", watts=0, color="red")


def test_a_default_of_a_class_may_stand():
    assert target("Thing", size=3, name="n").build(world="w").name == "n"


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "rft.nowhere.Thing"}, r"^actor\._target_: 'rft\.nowhere\.Thing' cannot be imported \(No module"),
        ({"_target_": "rft.registry.Thing"}, r"^actor\._target_: 'rft\.registry\.Thing' cannot be imported"),
        ({"_target_": "Thing"}, r"^actor\._target_: 'Thing' cannot be imported"),
        ({"_target_": ""}, r"^actor\._target_: '' cannot be imported"),
        ({"size": 3}, r"^actor: expected a class as \{_target_: module\.Class, options\}, got \{'size': 3\}"),
        (None, r"^actor: expected a class as .*, got None"),
        ({"_target_": f"{__name__}.Thing", "sise": 3}, r"^actor\.sise: Thing takes size, name; did you mean size\?$"),
        ({"_target_": f"{__name__}.Thing"}, r"^actor\.size is missing: Thing needs it; add `size: <whole number>`$"),
        ({"_target_": f"{__name__}.Thing", "size": 3, "world": "w"}, r"^actor\.world: Thing takes size, name$"),
        ({"_target_": f"{__name__}.make_thing", "size": True}, r"^actor\.size: expected whole number, got True$"),
    ],
)
def test_a_target_that_does_not_fit(node, message):
    with pytest.raises(ValueError, match=message):
        Target(node, "actor", ("world", "seed"))


def test_a_part_that_is_not_there_is_named_and_what_a_part_lacks_is_no_mistake_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "part_without_package.py").write_text("import package_of_nobody")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^mode=x: part_not_here\.run is not in this package"):
        import_part("part_not_here.run", "f", "mode=x")
    with pytest.raises(ModuleNotFoundError, match="package_of_nobody"):
        import_part("part_without_package", "f", "mode=x")


def test_a_folder_of_plugins_imports_the_files_that_are_there(tmp_path, monkeypatch):
    folder = tmp_path / "plugins_of_a_folder"
    folder.mkdir()
    (folder / "__init__.py").write_text("from rft.imports import import_all\n\nimport_all(__name__)\n")
    (folder / "first.py").write_text("NUMBER = 1\n")
    (folder / "second.py").write_text("NUMBER = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_all("plugins_of_a_folder")
    assert [sys.modules[f"plugins_of_a_folder.{name}"].NUMBER for name in ("first", "second")] == [1, 2]


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """A registry, and the modules `own_losses` and `own_package.losses`, of which the first registers `kept` in it."""
    registry = Registry("loss", reads=())
    monkeypatch.setattr("builtins.OF_A_TEST", registry, raising=False)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "losses.py").write_text("def plain(logprobs, batch): ...\n")
    (tmp_path / "own_losses.py").write_text(
        "def plain(logprobs, batch, *, tau: float):\n    return tau * logprobs, batch\n\n\n"
        "@OF_A_TEST.register('kept', reads=('advantages',))\ndef stated(logprobs, batch): ...\n"
    )
    (tmp_path / "own_broken.py").write_text("A = 1\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield registry
    for name in ("own_losses", "own_package", "own_package.losses"):
        sys.modules.pop(name, None)


def test_a_name_with_a_dot_is_a_function_of_a_module(own_modules):
    plugin = own_modules.build({"name": "own_losses.plain", "tau": 0.5}, KEY)
    assert (plugin.title, plugin.facts.reads) == ("the loss 'own_losses.plain'", ())
    assert plugin(2.0, "b") == (1.0, "b")
    assert own_modules.function("own_losses.plain") is sys.modules["own_losses"].plain
    assert own_modules.build({"name": "own_package.losses.plain"}, KEY).facts.reads == ()
    # one that its module registers has the facts that it states
    assert own_modules.build({"name": "own_losses.stated"}, KEY).facts.reads == ("advantages",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_lossses.plain", "no module 'own_lossses' is found; it is looked for beside the recipe"),
        ("own_package.loss.plain", "no module 'own_package.loss' is found; it is looked for"),
        ("own_losses.plane", "own_losses has no loss 'plane'; did you mean plain?"),
        ("own_broken.plain", "the module 'own_broken' cannot be imported: own_broken.py:2: ZeroDivisionError"),
    ],
)
def test_a_name_with_a_dot_that_leads_nowhere_is_an_error_with_its_key(own_modules, name, message):
    with pytest.raises(ValueError) as raised:
        own_modules.build({"name": name}, KEY)
    assert str(raised.value).startswith(f"algorithm.loss.name={name}: {message}")


@pytest.mark.parametrize("name", ["../x", ".plain", "own_losses.", "own losses.plain", ""])
def test_a_text_that_names_no_module(own_modules, name):
    with pytest.raises(ValueError, match=r"^algorithm\.loss\.name: no loss is called"):
        own_modules.build({"name": name}, KEY)
    with pytest.raises(ValueError, match=r"^plugins: no module '.*' is found"):
        import_plugin(name, "plugins")


def test_names_that_come_with_the_data_import_nothing(own_modules):
    from rft.reward.rules.instructions.ifeval import INSTRUCTIONS

    for name in ("own_losses.plain", "os.system"):
        with pytest.raises(ValueError, match="no instruction is called"):
            INSTRUCTIONS.build({"name": name, "tau": 0.5}, "kwargs")
    assert "own_losses" not in sys.modules
