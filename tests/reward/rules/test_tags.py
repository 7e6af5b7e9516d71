"""Which responses have their parts between the tags, and which marks of tags they have."""

import pytest

from rft.registry import Plugin
from rft.reward import REWARDS
from rft.reward.rules.tags import last_block
from tests.reward.reward_of import score_of


def rule(**options: object) -> Plugin:
    node = {"name": "tags", "tags": ["think", "answer"], "outside": "blank", "empty": False}
    return REWARDS.build(node | options, "reward.terms.tags")


def count(*tags: str) -> Plugin:
    return REWARDS.build({"name": "tag_count", "tags": list(tags)}, "reward.terms.count")


GOOD = [
    "<think>so</think><answer>4</answer>",
    "<think>\nso\n</think>\n<answer>\n4\n</answer>",
    " \n<think>so</think>  <answer>4</answer>\n",
    "<think>a < b, <b>bold</b> and <Think></think><answer>4</answer>",  # other tags are text
]
BAD = [
    "",
    "4",
    "<think>so</think>",
    "<answer>4</answer>",
    "<answer>4</answer><think>so</think>",
    "<think>so<answer>4</answer></think>",
    "<think>so<answer></think>4</answer>",
    "<think>so</think><think>so</think><answer>4</answer>",
    "<think>so</think></think><answer>4</answer>",
    "<think>so</think><answer>4</answer><answer>5</answer>",
    "<think>so</think><answer>4",
    "so</think><answer>4</answer>",
    "</think>so<think><answer>4</answer>",
    "< think>so</think><answer>4</answer>",
    "<THINK>so</THINK><answer>4</answer>",
]
# (response, the values of outside for which it is right)
OUTSIDE = [
    ("<think>so</think><answer>4</answer>", {"blank", "after", "any"}),
    ("<think>so</think><answer>4</answer> is it", {"after", "any"}),
    ("<think>so</think> so <answer>4</answer>", {"any"}),
    ("Well, <think>so</think><answer>4</answer>", {"any"}),
    ("Well, <think>so</think> so <answer>4</answer> is it", {"any"}),
]


@pytest.mark.parametrize("response", GOOD)
def test_each_tag_once_in_order(response: str) -> None:
    assert rule()(response, {}) == 1.0
    assert rule(tags=["answer", "think"])(response, {}) == 0.0


@pytest.mark.parametrize("response", BAD)
@pytest.mark.parametrize("outside", ["blank", "after", "any"])
def test_a_tag_that_is_missing_repeated_nested_or_out_of_order(response: str, outside: str) -> None:
    assert rule(outside=outside, empty=True)(response, {}) == 0.0


@pytest.mark.parametrize(("response", "right"), OUTSIDE)
@pytest.mark.parametrize("outside", ["blank", "after", "any"])
def test_text_outside_of_the_tags(response: str, right: set[str], outside: str) -> None:
    assert rule(outside=outside)(response, {}) == float(outside in right)


@pytest.mark.parametrize("response", ["<think> \n</think><answer>4</answer>", "<think>so</think><answer></answer>"])
def test_a_tag_without_content(response: str) -> None:
    assert rule()(response, {}) == 0.0
    assert rule(empty=True)(response, {}) == 1.0


def test_one_tag_as_in_a_think_format() -> None:
    check = rule(tags=["think"], outside="after")
    assert check("<think>\nso\n</think>\nIt is 4.", {}) == 1.0
    assert check("<think>\nso\nIt is 4.", {}) == 0.0
    assert check("It is 4. <think>so</think>", {}) == 0.0


def test_the_prompt_may_have_opened_the_first_tag() -> None:
    def check(response: str, row: dict[str, str], **options: object) -> float:
        return score_of("tags", response, row, **options)

    right, opened = "so</think><answer>4</answer>", {"prompt_opens": "<think>"}
    assert check(right, opened) == check(right, {}, prompt_opens=True) == 1.0
    assert check(right, {}) == check(right, opened, prompt_opens=False) == 0.0
    assert check("<think>so</think><answer>4</answer>", opened) == 0.0  # opened twice
    assert check(" </think><answer>4</answer>", opened) == 0.0  # empty
    assert check("so", opened) == 0.0
    plan = {"tags": ["plan", "answer"], "prompt_opens": True}
    assert check("so</plan><answer>4</answer>", {}, **plan) == 1.0, "the first tag of the list"


@pytest.mark.parametrize(
    ("response", "share"),
    [
        ("<think>so</think><answer>4</answer>", 1.0),
        ("<answer>4</answer> is so <think></think>", 1.0),  # the order does not count
        ("<think>so</think><answer>4", 0.75),
        ("<think>so<think></think><answer>4", 0.5),
        ("</answer>", 0.25),
        ("", 0.0),
        ("<think><think></think></think>", 0.0),
    ],
)
def test_the_share_of_marks_that_are_there_once(response: str, share: float) -> None:
    assert count("think", "answer")(response, {}) == share


def test_the_opening_mark_of_the_prompt_counts() -> None:
    opened = {"prompt_opens": "<think>"}
    shares = [score_of("tag_count", text, opened, tags=["think"]) for text in ("so</think>", "so", "<think>so</think>")]
    assert shares == [1.0, 0.5, 0.5]


@pytest.mark.parametrize("name", ["tags", "tag_count"])
@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ([], r"tags: \[\] must be one or more different names"),
        (["think", "think"], r"tags: \['think', 'think'\] must be one or more different names"),
        (["<think>"], r"tags: '<think>' is no name of a tag; write it without brackets: think"),
        (["think", ""], r"tags: '' is no name of a tag"),
    ],
)
def test_names_that_are_none(name: str, tags: list[str], message: str) -> None:
    node = {"name": name, "tags": tags}
    with pytest.raises(ValueError, match=rf"^reward\.terms\.a\.{message}"):
        REWARDS.build(node if name == "tag_count" else node | {"outside": "any", "empty": True}, "reward.terms.a")


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("<a>1</a>", "1"),
        ("<a>1</a> and <a>2</a>", "2"),
        ("<a>1</a> and <a>2", "1"),
        ("<a>1 <a>2</a>", "2"),
        ("<a></a>", ""),
        ("1</a>", None),
        ("</a><a>", None),
        ("<a>1", None),
        ("", None),
    ],
)
def test_the_last_block(response: str, text: str | None) -> None:
    assert last_block(response, "a") == text
