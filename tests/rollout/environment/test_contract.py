import pytest

from rft.registry import Target
from rft.rollout.environment.contract import checked_reward, checked_step, environment_class, refuse_arguments
from tests.rollout.environment.play import environments

HERE = __name__


class NoReset:
    def tool(self) -> str:
        """A tool."""


class Both:
    def reset(self, **row): ...

    def step(self, action): ...

    def tool(self) -> str:
        """A tool."""


class Neither:
    def reset(self, **row): ...

    def _private(self): ...


class Untyped:
    def reset(self, **row): ...

    def tool(self, item):
        """A tool.

        Args:
            item: what.
        """


class Undocumented:
    def reset(self, **row): ...

    def tool(self, item: str) -> str: ...


class Dynamic:
    def __init__(self, names: list[str]) -> None:
        if not names:
            raise ValueError("names is empty")
        self._names = names

    def reset(self, **row): ...

    def describe_tools(self):
        return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in self._names]

    def call_tool(self, name, arguments): ...


def made():
    return Both()


def test_the_contract_of_a_class():
    shop = environment_class({"_target_": f"{environments.__name__}.Shop"}, "environment.classes.shop")
    assert isinstance(shop.target, Target) and not shop.steps and shop.scores and not shop.closes
    assert sorted(shop.tools) == ["price", "stock"]
    assert shop.tools["price"]["function"] == {
        "name": "price",
        "description": "The price of goods.",
        "parameters": {
            "type": "object",
            "properties": {
                "item": {"type": "string", "description": "what is bought."},
                "count": {"type": "integer", "description": "how many."},
            },
            "required": ["item"],
        },
        "return": {"type": "string"},
    }
    guess = environment_class({"_target_": f"{environments.__name__}.Guess"}, "environment.classes.guess")
    assert guess.steps and guess.scores and guess.closes and not guess.tools


def test_tools_that_are_no_methods():
    def dynamic(*names):
        return environment_class({"_target_": f"{HERE}.Dynamic", "names": [*names]}, "environment.classes.x")

    found = dynamic("close", "b")
    assert found.dynamic and not found.steps and not found.methods and not found.closes
    assert [*found.tools] == ["close", "b"] and found.tools is found.tools, "an object is asked once"
    with pytest.raises(ValueError, match=r"^environment\.classes\.x: two tools have one name \(a, b, a\)"):
        assert dynamic("a", "b", "a").tools
    with pytest.raises(ValueError, match=r"^environment\.classes\.x: names is empty"):
        assert dynamic().tools


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoReset", "NoReset has no method `reset"),
        ("Both", r"Both has `step` and tools \(tool\)"),
        ("Neither", "neither tools, public methods with types, nor `step`"),
        ("Untyped", r"the tool Untyped.tool has no schema .*give it types and a Google docstring"),
        ("Undocumented", r"the tool Undocumented.tool has no schema"),
        ("Missing", "cannot be imported"),
        ("made", "is no class"),
    ],
)
def test_a_class_that_breaks_the_contract_is_refused(name, message):
    with pytest.raises(ValueError, match=rf"^environment\.classes\.x.*{message}"):
        environment_class({"_target_": f"{HERE}.{name}"}, "environment.classes.x")


def test_an_option_of_a_class_is_checked():
    with pytest.raises(ValueError, match=r"environment\.classes\.x\.money: Shop takes currency"):
        environment_class({"_target_": f"{environments.__name__}.Shop", "money": "EUR"}, "environment.classes.x")


def test_arguments_of_a_call():
    schema = environment_class({"_target_": f"{environments.__name__}.Shop"}, "k").tools["price"]
    assert refuse_arguments({"item": "tea"}, schema) is None
    assert refuse_arguments({"item": "tea", "count": 2}, schema) is None
    assert refuse_arguments({}, schema) == "the argument item is missing"
    assert refuse_arguments({"item": 1, "size": 2}, schema) == "it takes no argument size (it takes: item, count)"


def test_steps_and_rewards():
    assert checked_step(("o", True, 0, 1, {})) == ("o", 1.0, False, True)
    assert checked_step(["o", 2, False, False, {}]) == ("o", 2.0, False, False), "JSON has lists in the place of tuples"
    for wrong in (None, ("o", 1.0), ("o", "1", False, False, {}), ("o", float("inf"), False, False, {})):
        with pytest.raises(ValueError, match=r"step returned|the reward is"):
            checked_step(wrong)
    for wrong in (None, "1", float("nan"), [1]):
        with pytest.raises(ValueError, match="not a finite number"):
            checked_reward(wrong)
