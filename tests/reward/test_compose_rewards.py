"""The weighted sum, its errors, and its yaml."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import rft
from rft.errors import FunctionError
from rft.registry import Registry, Target
from rft.reward import REWARDS
from tests.reward.reward_of import reward_of

EXACT = {"name": "exact_match", "weight": 1.0, "strip": True}
FORMAT = {"name": "format", "weight": 0.25, "pattern": "[a-z]+", "match": "whole"}
CONFIG = str(Path(rft.__file__).parent / "config")


@pytest.fixture
def own(plugins_forgotten: None) -> Registry:
    """The registry, which forgets afterwards what a test adds."""
    return REWARDS


def test_weighted_sum_and_raw_terms() -> None:
    reward = reward_of({"right": EXACT, "shape": FORMAT}, accuracy="right")
    rows = [{"answer": "abc"}, {"answer": "abc"}, {"answer": "ABC"}, {"answer": "x"}]
    scores = reward.score(["abc", "abd", "ABC", "1"], rows)
    total, terms = scores.total, scores.terms
    assert terms.keys() == {"right", "shape"}
    torch.testing.assert_close(terms["right"], torch.tensor([1.0, 0.0, 1.0, 0.0]))
    torch.testing.assert_close(terms["shape"], torch.tensor([1.0, 1.0, 0.0, 0.0]))  # raw, not times its weight
    torch.testing.assert_close(total, torch.tensor([1.25, 0.25, 1.0, 0.0]))
    assert total.dtype == torch.float32
    assert (reward.accuracy, reward.names, reward.fields) == ("right", ("right", "shape"), ("answer",))


def test_a_weight_may_be_zero_or_negative() -> None:
    reward = reward_of({"right": EXACT | {"weight": 0}, "shape": FORMAT | {"weight": -1}}, accuracy="right")
    scores = reward.score(["abc"], [{"answer": "abc"}])
    total, terms = scores.total, scores.terms
    assert (total.item(), terms["right"].item()) == (-1.0, 1.0)


def test_the_term_of_the_accuracy_tells_what_it_extracts() -> None:
    reward = reward_of({"right": EXACT, "shape": FORMAT}, accuracy="right")
    assert reward.extracts and reward.extract([" abc\n", "x", ""], [{}] * 3) == ["abc", "x", ""]
    exact = reward_of({"right": EXACT | {"strip": False}}, accuracy="right")
    assert exact.extract([" abc"], [{}]) == [" abc"]
    mute = reward_of({"right": EXACT, "shape": FORMAT}, accuracy="shape")
    assert not mute.extracts and mute.extract(["abc", "x"], [{}] * 2) == [None, None]


def test_no_rows() -> None:
    scores = reward_of({"right": EXACT}, accuracy="right").score([], [])
    total, terms = scores.total, scores.terms
    assert total.shape == terms["right"].shape == (0,)


def test_fields_are_the_union_of_what_terms_read(own: Registry) -> None:
    @own.register("hinted", reads=("hint", "answer"))
    def hinted(response: str, row: Mapping[str, Any]) -> float:
        return 0.5

    reward = reward_of({"a": EXACT, "b": {"name": "hinted", "weight": 1.0}}, accuracy="a")
    assert reward.fields == ("answer", "hint")


@pytest.mark.parametrize(
    ("terms", "accuracy", "message"),
    [
        ({}, "right", r"reward\.terms is empty"),
        ({"right": EXACT}, "rigth", r"reward\.accuracy=rigth is none of reward\.terms.*did you mean right"),
        ({"right": {"name": "exact_match", "strip": True}}, "right", r"reward\.terms\.right\.weight is missing"),
        ({"right": EXACT | {"weight": "1"}}, "right", r"reward\.terms\.right\.weight: expected number"),
        ({"right": EXACT | {"weight": math.inf}}, "right", r"reward\.terms\.right\.weight=inf: it must be finite"),
        ({"right": EXACT | {"name": "exactmatch"}}, "right", r"reward\.terms\.right\.name.*did you mean exact_match"),
        ({"right": EXACT | {"stripp": True}}, "right", r"reward\.terms\.right\.stripp.*did you mean strip"),
        ({"right": {"name": "exact_match", "weight": 1.0}}, "right", r"reward\.terms\.right\.strip is missing"),
        ({"shape": FORMAT | {"pattern": "(a"}}, "shape", r"reward\.terms\.shape\.pattern: '\(a' is not a regular"),
        (
            {"n": {"name": "gsm8k", "weight": 1.0, "method": "strict", "markers": []}},
            "n",
            r"reward\.terms\.n\.markers: \[\] gives no text",
        ),
        (
            {"n": {"name": "gsm8k", "weight": 1.0, "method": "flexible", "markers": [""]}},
            "n",
            r"reward\.terms\.n\.markers: \[''\] gives no text",
        ),
    ],
)
def test_bad_terms_name_the_key(terms: dict[str, Any], accuracy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward_of(terms, accuracy)


def test_a_failing_reward_names_its_term_and_row(own: Registry) -> None:
    @own.register("broken", reads=())
    def broken(response: str, row: Mapping[str, Any]) -> float:
        return 1.0 / len(response)

    reward = reward_of({"mine": {"name": "broken", "weight": 1.0}}, accuracy="mine")
    with pytest.raises(ValueError, match=r"reward term 'mine' failed on row 1, response ''.*ZeroDivisionError") as info:
        reward.score(["a", ""], [{}, {}])
    assert isinstance(info.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
def test_a_score_that_is_not_finite_names_its_term_and_rows(own: Registry, bad: float) -> None:
    @own.register("wild", reads=())
    def wild(response: str, row: Mapping[str, Any]) -> float:
        return bad if response == "bad" else 1.0

    reward = reward_of({"mine": {"name": "wild", "weight": 0.0}}, accuracy="mine")
    with pytest.raises(ValueError, match=r"reward term 'mine' gave 1 scores.*row 2: .*, response 'bad'"):
        reward.score(["a", "b", "bad"], [{}, {}, {}])


def reward_node(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(CONFIG, version_base="1.3"):
        node = OmegaConf.to_container(compose(overrides=list(overrides)).reward)
    assert isinstance(node, dict)
    return {str(name): value for name, value in node.items()}


def test_yaml_exact() -> None:
    node = reward_node("+reward=exact")
    assert node["terms"] == {"exact_match": {"name": "exact_match", "weight": 1.0, "strip": True}}
    reward = Target(node, "reward").build()
    scores = reward.score(["12 "], [{"answer": "12"}])
    total, _ = scores.total, scores.terms
    assert total.tolist() == [1.0]


def test_yaml_gsm8k() -> None:
    node = reward_node("+reward=gsm8k")
    assert list(node["terms"]) == ["gsm8k", "format"]
    reward = Target(node, "reward").build()
    row = {"answer": "2+2 = <<2+2=4>>4\n#### 4"}
    responses = ["2+2 = <<2+2=4>>4\n#### 4", "#### 4\n#### 4", "#### 5", "it is 4"]
    scores = reward.score(responses, [row] * 4)
    total, terms = scores.total, scores.terms
    assert terms["gsm8k"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert terms["format"].tolist() == [1.0, 0.0, 1.0, 0.0]
    torch.testing.assert_close(total, torch.tensor([1.1, 1.0, 0.1, 0.0]))


def test_terms_compose_on_the_command_line() -> None:
    node = reward_node("+reward=exact", "reward/terms=[exact_match,format]", "reward.terms.format.weight=0.5")
    assert node["terms"]["format"]["weight"] == 0.5
    assert Target(node, "reward").build().names == ("exact_match", "format")


@pytest.mark.parametrize(("value", "what"), [(None, "no numbers"), ("1", "no numbers"), (1e38, "above 1e+15 in size")])
def test_a_value_that_is_no_usable_score_names_its_row(own: Registry, value: Any, what: str) -> None:
    @own.register("odd", reads=())
    def odd(response: str, row: Any) -> Any:
        return value if response == "b" else 1.0

    terms = {"odd": {"name": "odd", "weight": 1.0}}
    with pytest.raises(FunctionError) as caught:
        reward_of(terms, "odd").score(["a", "b"], [{}, {}])
    assert str(caught.value) == f"the reward term 'odd' gave 1 scores that are {what}: row 1: {value!r}, response 'b'"
