"""The scores that reasoning-gym gives to responses to its own problems."""

import ast
import inspect
import textwrap

import pytest

from rft.data.rows.packages.reasoning_gym import generate
from rft.reward.rules.reasoning_gym import RUNNING, ReasoningGymScore
from tests.reward.reward_of import reward_of

factory = pytest.importorskip("reasoning_gym.factory")  # see tests/data/rows


def term(tag="answer", run_answers=False):
    return ReasoningGymScore("reward.terms.reasoning_gym", tag, run_answers)


def rows(tasks):
    return generate(tasks, 2, 0, "data.train")


def test_the_answer_between_tags_is_scored():
    row = rows({"chain_sum": {}})[0]
    right = row["answer"]
    texts = {f"So <answer> {right}\n</answer>": 1.0, f"<answer>0</answer> no: <answer>{right}</answer>": 1.0}
    texts |= {"<answer>x</answer>": 0.0, str(right): 0.0, "": 0.0, f"<answer>{right}": 0.0}
    assert {text: term().value(text, row) for text in texts} == texts
    assert term(None).value(f" {right} ", row) == 1.0
    assert term().extract(f"<answer> {right}\n</answer>") == right and term().extract("none") is None


def test_the_options_of_the_task_reach_its_checker():
    """The checker of decimal_arithmetic allows an error of one unit of the last place in its configuration."""
    [fine, _] = rows({"decimal_arithmetic": {"max_num_decimal_places": 6}})
    near = f"{float(fine['answer']) + 1e-4:.8f}"
    coarse = {"reasoning_gym": fine["reasoning_gym"] | {"options": {"max_num_decimal_places": 3}}}
    assert (term(None).value(near, fine), term(None).value(near, coarse)) == (0.0, 1.0)


def test_several_tasks_score_their_gold_answers():
    found = rows({"leg_counting": {}, "spell_backward": {}, "letter_counting": {}, "gcd": {}, "sudoku": {}})
    assert [term().value(f"<answer>{row['answer']}</answer>", row) for row in found] == [1.0] * 10
    others = found[2:] + found[:2]
    pairs = zip(found, others, strict=True)
    scores = [term().value(f"<answer>{other['answer']}</answer>", row) for row, other in pairs]
    assert max(scores) < 0.5, "the answers to other problems are wrong"


def test_a_checker_that_raises_an_error_leaves_the_response_unscored():
    """prime_factorization reads the answer with int() and does not catch the error."""
    node = {"_target_": "rft.reward.rules.reasoning_gym.ReasoningGymScore", "weight": 1.0, "tag": None}
    node |= {"run_answers": False, "call": {"workers": "process", "deadline_s": 60.0, "failed": "drop_row"}}
    found = rows({"prime_factorization": {}})
    scores = reward_of({"rg": node}, "rg").score([found[0]["answer"], "seven"], found)
    assert scores.total[0] == 1.0 and scores.total[1].isnan() and scores.unscored == [{}, {"rg": "ValueError"}]


def test_tasks_that_run_answers_are_refused_without_consent():
    [row, _] = rows({"puzzle24": {}})
    said = r"^the checker of the task puzzle24 runs answers as Python code.*reward\.terms\.reasoning_gym\.run_answers="
    with pytest.raises(ValueError, match=said):
        term().check_row(row)
    term(run_answers=True).check_row(row)
    term().check_row(rows({"gcd": {}})[0])


def test_the_list_of_these_tasks_is_complete():
    """In the installed version: calls of eval, exec, parse_expr and sympify by a checker or its methods."""
    found = set()
    for name, (task, _) in factory.DATASETS.items():
        checker = ast.parse(textwrap.dedent(inspect.getsource(task.score_answer)))
        called = [node.func for node in ast.walk(checker) if isinstance(node, ast.Call)]
        own = [vars(task)[one.attr] for one in called if isinstance(one, ast.Attribute) and one.attr in vars(task)]
        inner = [ast.parse(textwrap.dedent(inspect.getsource(method))) for method in own if callable(method)]
        calls = [node for tree in (checker, *inner) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = {ast.unparse(node.func).split(".")[-1] for node in calls}
        if names & {"eval", "exec", "parse_expr", "sympify"}:
            found.add(name)
    assert found - RUNNING == {"number_sorting"}, "which evaluates the gold answer alone"
    assert found >= RUNNING


@pytest.mark.parametrize("entry", [None, {"task": "gcd"}, "text"])
def test_rows_of_another_source(entry):
    with pytest.raises(ValueError, match="is not one that rows of data=reasoning_gym have"):
        term().check_row({"reasoning_gym": entry})


def test_a_tag_that_is_none():
    with pytest.raises(ValueError, match=r"^reward\.terms\.reasoning_gym\.tag: '<answer>' is no name of a tag"):
        term("<answer>")
