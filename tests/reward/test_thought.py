"""What terms read of responses with thoughts: those that a prompt opens, and those of the response itself."""

import json

import pytest

from rft.batch.row_fields import EPISODE_FIELD
from rft.reward import REWARDS
from rft.reward.sandbox import code
from rft.reward.sandbox.code import ProgramTests
from rft.reward.sandbox.sandbox import Outcome
from tests.helpers import yaml_options
from tests.reward.reward_of import reward_of, score_of

OPENED = {"prompt_opens": "<think>"}
CALL = {"name": "f", "arguments": {}}
RULES = {  # a right answer, and the row
    "exact_match": ("4", {"answer": "4"}),
    "gsm8k": ("#### 4", {"answer": "4"}),
    "math": (r"\boxed{4}", {"answer": "4"}),
    "choice": ("The answer is B.", {"answer": "B"}),
    "verdict": ("Verdict: yes", {"answer": "yes"}),
    "overlap": ("Denver Broncos", {"answer": "Denver Broncos"}),
    "json": ('{"a": 1}', {}),
    "tool_call": (f"<tool_call>{json.dumps(CALL)}</tool_call>", {"answer": [CALL]}),
    "tool_call_valid": (f"<tool_call>{json.dumps(CALL)}</tool_call>", {"tools": [{"name": "f"}]}),
    "ifeval": ("no comma", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_look_for_the_answer_behind_the_thought(name):
    answer, row = RULES[name]
    if name == "overlap":
        assert score_of(name, f"{answer}, or not", row) < 1.0
    for row_of, begin in ((row | OPENED, ""), (row, "<think>")):
        assert score_of(name, f"{begin}So,\n</think>\n\n{answer}", row_of) == 1.0
        assert score_of(name, f"{begin}{answer}", row_of) == 0.0, "the thought does not end"
        assert score_of(name, f"{begin}{answer}</think>", row_of) == 0.0, "there is nothing behind it"
    assert score_of(name, answer, row) == 1.0
    assert score_of(name, answer, row | OPENED, prompt_opens=False) == 1.0
    assert score_of(name, answer, row, prompt_opens=True) == 0.0
    assert score_of(name, answer, row | OPENED, reasoning=[]) == 1.0, "all text counts"


def test_a_response_without_an_answer_makes_no_call():
    """Where no call is right, a response without a call is; one whose thought does not end has no answer."""
    row = {"answer": []}
    assert score_of("tool_call", "No.", row) == score_of("tool_call", "hm</think>No.", row | OPENED) == 1.0
    assert score_of("tool_call", "No.", row | OPENED) == score_of("tool_call", "<think>No.", row) == 0.0


def test_other_marks():
    row = {"answer": "4"}
    seed = row | {"prompt_opens": "<seed:think>"}
    assert score_of("math", r"\boxed{5}</seed:think>\boxed{4}", seed) == 1.0
    assert score_of("math", r"\boxed{4}", seed) == 0.0
    assert score_of("math", r"so</seed:think><think>\boxed{4}", seed) == 0.0, "both kinds"
    own = {"reasoning": ["<plan>", "</plan>"], "prompt_opens": True}
    assert score_of("math", r"\boxed{5}</plan>\boxed{4}", row, **own) == 1.0
    assert score_of("math", r"\boxed{4}", row, **own) == 0.0
    assert score_of("math", r"\boxed{4}", row | {"prompt_opens": "nothing known"}) == 1.0


def test_rules_about_the_form_see_the_mark_of_the_prompt():
    pattern = {"pattern": "(?s)<think>.*</think>.*"}
    assert score_of("format", "so</think>4", OPENED, **pattern) == 1.0
    assert score_of("format", "so</think>4", {}, **pattern) == 0.0
    assert score_of("format", "so</think>4", {}, **pattern, prompt_opens=True) == 1.0


BEGUN = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "The answer is "}]


def test_a_response_has_the_beginning_that_its_prompt_ends_with_where_the_reward_includes_it():
    row = {"answer": "The answer is 4", "prompt": BEGUN}
    parts = [BEGUN[0], {"role": "assistant", "content": [{"type": "text", "text": "The answer is "}]}]
    scores = [score_of("exact_match", "4", each, include_prefill=True) for each in (row, row | {"prompt": parts})]
    assert scores == [1.0, 1.0] and score_of("exact_match", "4", row) == 0.0
    node = yaml_options("reward/terms/exact_match.yaml")
    for included, vote in ((True, "The answer is 4"), (False, "4")):
        assert reward_of(node, "exact_match", include_prefill=included).extract(["4"], [row]) == [vote]
    for prompt in ("2+2?", BEGUN[:1], BEGUN[1:]):  # nothing is begun, or no question is asked
        assert score_of("exact_match", "4", {"answer": "4", "prompt": prompt}, include_prefill=True) == 1.0
    assert score_of("exact_match", "4", row | {"answer": "4", EPISODE_FIELD: {}}, include_prefill=True) == 1.0
    assert BEGUN[1]["content"] == "The answer is ", "the row is as it was"


def test_the_prompt_of_a_response_with_its_beginning_ends_before_it():
    seen = []

    def asked(response, row):
        seen.append((response, row["prompt"]))
        return 1.0

    REWARDS.register("asked_here")(asked)
    row = {"prompt": BEGUN}
    for included in (True, False):  # of a term that gets whole responses, too
        node = {"name": "asked_here", "weight": 1.0, "include_prefill": included}
        reward_of({"own": node}, "own").score(["4"], [row])
    assert seen == [("The answer is 4", BEGUN[:1]), ("4", BEGUN)]


def test_a_thought_that_the_beginning_opens_is_opened_once():
    """By the text itself: a template that opens one in front of it opens it still."""
    pattern = {"pattern": "(?s)<think>[^<]*</think>.*", "include_prefill": True}
    for content in ("<think> First,", "First,"):
        row = OPENED | {"prompt": [BEGUN[0], {"role": "assistant", "content": content}]}
        assert score_of("format", " so</think>4", row, **pattern) == 1.0
        assert score_of("exact_match", " so</think>4", row | {"answer": "4"}, include_prefill=True) == 1.0
        assert score_of("exact_match", " so 4", row | {"answer": "4"}, include_prefill=True) == 0.0


def test_other_rules_see_the_response():
    letters = {"scripts": ["latin"], "without_letters": 0.0}
    assert score_of("script", "да no</think>no", OPENED, **letters) == pytest.approx(9 / 11)
    seen = []

    def own(response, row):
        seen.append((response, row["prompt_opens"]))
        return 1.0

    REWARDS.register("seen_here")(own)
    reward = reward_of({"a": {"name": "seen_here", "weight": 1.0}}, "a")
    assert reward.score(["so</think>4"], [OPENED]).terms["a"].item() == 1.0
    assert seen == [("so</think>4", "<think>")]


@pytest.fixture(autouse=True)
def forgotten(plugins_forgotten):
    """Functions of these tests are registered in them alone."""


def test_functions_of_ones_own_may_state_what_they_read():
    REWARDS.register("echo", thoughts="skip", extract=lambda response: response)(lambda response, row: len(response))
    reward = reward_of({"echo": {"name": "echo", "weight": 1.0}}, "echo")
    responses, rows = ["so</think>\nfour", "four", "four"], [OPENED, {}, OPENED]
    assert reward.score(responses, rows).terms["echo"].tolist() == [4.0, 4.0, 0.0]
    assert reward.extract(responses, rows) == ["four", "four", None]


def test_an_option_of_the_same_name_stays_with_its_function():
    def own(response, row, *, reasoning: str):
        return float(response == reasoning)

    REWARDS.register("own_option")(own)
    node = {"name": "own_option", "weight": 1.0, "reasoning": "hm"}
    assert reward_of({"a": node}, "a").score(["hm"], [{}]).terms["a"].item() == 1.0


def test_the_options_of_the_reward_hold_for_all_terms():
    nodes = {name: yaml_options(f"reward/terms/{name}.yaml")[name] for name in ("tags", "exact_match")}

    def scores(**options):
        terms = reward_of(nodes, "exact_match", **options).score(["so</think><answer>4</answer>"], [{"answer": "A"}])
        return terms.terms["tags"].item()

    assert (scores(), scores(prompt_opens=True)) == (0.0, 1.0)
    text, row = "<a>so</a>4", {"answer": "4"}
    alone = {"exact_match": nodes["exact_match"]}
    assert reward_of(alone, "exact_match", reasoning=["<a>", "</a>"]).score([text], [row]).total.item() == 1.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "gsm8k",
            {"reasoning": ["<think>"]},
            r"reward\.terms\.gsm8k\.reasoning=\['<think>'\]: write the tags before",
        ),
        ("gsm8k", {"reasoning": ["", "</think>"]}, r"reward\.terms\.gsm8k\.reasoning=.*: write the tags before and"),
        ("gsm8k", {"reasoning": "none"}, r"reward\.terms\.gsm8k\.reasoning: expected list\[str\], got 'none'"),
        ("gsm8k", {"prompt_opens": "yes"}, r"reward\.terms\.gsm8k\.prompt_opens: expected true or false, got 'yes'"),
        (
            "gsm8k",
            {"prompt_opens": True, "reasoning": []},
            r"gsm8k\.prompt_opens=true: reward\.terms\.gsm8k\.reas",
        ),
        (
            "repetition",
            {"prompt_opens": True},
            r"reward\.terms\.repetition\.prompt_opens: this term gets whole",
        ),
    ],
)
def test_options_that_cannot_be(name, options, message):
    with pytest.raises(ValueError, match=message):
        score_of(name, "", {"answer": "4"}, **options)
    with pytest.raises(ValueError, match=r"^reward\.reasoning=\['a'\]: write the tags before and after it"):
        reward_of({"exact_match": yaml_options("reward/terms/exact_match.yaml")["exact_match"]}, "exact_match",
                  reasoning=["a"])  # fmt: skip


def test_a_term_in_worker_processes_gets_the_answer():
    node = yaml_options("reward/terms/gsm8k.yaml")["gsm8k"] | {"call": {"workers": "process"}}
    reward = reward_of({"gsm8k": node}, "gsm8k")
    texts, rows = ["#### 5</think>#### 4", "#### 4", "#### 4"], [{"answer": "4"} | OPENED] * 2 + [{"answer": "4"}]
    assert reward.score(texts, rows).total.tolist() == [1.0, 0.0, 1.0]
    reward.close()


def test_terms_that_are_classes_look_for_the_answer_too(monkeypatch):
    class Runs(ProgramTests):
        """Without a sandbox: every program passes."""

        count_passed = None

        def run(self, program, stdin):
            return Outcome("ok", "1\n", "", 0.0, "")

    monkeypatch.setattr(code, "CodeTests", Runs)
    program, row = "```python\nprint(1)\n```", {"tests": [{"input": "", "output": "1"}]}
    options = {"field": "tests", "program": "last_block", "score": "all", "entry_point": None, "asserts": "inside"}
    options |= {"stdout": "text"}
    node = {"_target_": "rft.reward.sandbox.code.CodeTests", "weight": 1.0, **options, "tolerance": 0.0, "prelude": ""}
    reward = reward_of({"code": node}, "code")
    texts = [program, f"so</think>{program}", program, f"<think>{program}"]
    assert reward.score(texts, [row, row | OPENED, row | OPENED, row]).total.tolist() == [1.0, 1.0, 0.0, 0.0]
