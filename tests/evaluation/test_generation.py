"""Numbers of held-out sets, against numbers by hand."""

import itertools
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rft.batch.scores import Scores, ScoringAtEnd
from rft.evaluation.base import EvaluationContext, measured, metric_value, summary, updated
from rft.evaluation.generation import GenerationEvaluator, GenerationOptions, metric_names
from rft.rollout.answerer import SingleTurn
from rft.rollout.engine.base import Completion, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.sanitize import warn_once
from tests.rollout.contexts import NO_THOUGHTS, plain_scoring

ROWS = [{"prompt": f"{number}=", "answer": str(number)} for number in range(5)]
GREEDY = Sampling(4, 0.0, 1.0, 0, 0.0, [], None)
SAMPLED = Sampling(4, 1.0, 1.0, 0, 0.0, [], None)
SEED = 11


class Encoder:
    thoughts = NO_THOUGHTS

    def prompts(self, rows):
        return [[int(row["answer"])] for row in rows]


class Sampler:
    """Greedy: right on even prompts, with as many tokens as the prompt says. Sampled: right where the seed is even."""

    def generate(self, requests, sampling, on_completion=None):
        answers = []
        for place, request in enumerate(requests):
            [number] = request.prompt
            answers.append([self.answer(number, seed, sampling) for seed in request.seeds])
            for sample, completion in enumerate(answers[-1]):
                on_completion(place, sample, completion)
        return answers

    def answer(self, number, seed, sampling):
        right = number % 2 == 0 if sampling is GREEDY else seed % 2 == 0
        return Completion(
            [1] * (number + 1), [-1.0] * (number + 1), "stop", str(number) if right else "no", [0] * (number + 1)
        )


def score(texts, rows):
    right = torch.tensor([float(text == row["answer"]) for text, row in zip(texts, rows, strict=True)])
    form = torch.tensor([0.5 if text == "no" else 1.0 for text in texts])
    return right + form, {"right": right, "form": form}


def accuracy_terms(rows):
    return ["right"] * len(rows)


def extract(texts, rows):
    return [None if text == "no" else text for text in texts]


def evaluate(world, samples=0, pass_k=(1, 4), maj_k=(), sets=None, scored_by=score, begin=None):
    told = []

    @contextmanager
    def progress(name, total):
        told.append((name, total, shown := []))
        yield shown.append

    evaluator = make_evaluator(world, sets or {"held": ROWS}, samples, pass_k, maj_k, scored_by, begin)
    return *evaluator.run(progress), told


def make_evaluator(world, sets, samples, pass_k, maj_k, scored_by=score, begin=None):
    options = GenerationOptions(GREEDY, SAMPLED, samples, list(pass_k), list(maj_k), SEED)
    begin = begin or plain_scoring(scored_by)
    reward = SimpleNamespace(begin=begin, extract=extract, accuracy="right", accuracy_terms=accuracy_terms)
    return GenerationEvaluator(
        EvaluationContext(world, Encoder(), sets), SingleTurn(Encoder(), Sampler()), reward, options
    )


def test_greedy_numbers_by_hand(ranks):
    [(numbers, answers, told)] = ranks(1, evaluate)
    # right on 0, 2, 4: mean 3/5, variance (3 x 0.16 + 2 x 0.36) / 4 = 0.3, error sqrt(0.3 / 5)
    assert numbers == pytest.approx(
        {
            "eval/held/accuracy": 0.6,
            "eval/held/accuracy_stderr": math.sqrt(0.06),
            "eval/held/form": 0.8,
            "eval/held/form_stderr": math.sqrt((3 * 0.04 + 2 * 0.09) / 4 / 5),
            "eval/held/length": 3.0,
        }
    )
    right = {"score": 1.0, "reward/right": 1.0, "reward/form": 1.0}
    wrong = {"response": "no", "score": 0.0, "reward/right": 0.0, "reward/form": 0.5}
    assert answers == {
        "held": [{"prompt": f"{n}=", **({"response": str(n), **right} if n % 2 == 0 else wrong)} for n in range(5)]
    }
    assert told == [("evaluate held", 5, [1, 2, 3, 4, 5])]


def test_samples_by_hand(ranks):
    [(numbers, _, told)] = ranks(1, lambda world: evaluate(world, samples=6, pass_k=(1, 2, 6)))
    right = [[row_seed(SEED, number, sample) % 2 == 0 for sample in range(6)] for number in range(5)]
    means = [sum(row) / 6 for row in right]
    mean = sum(means) / 5
    assert 0 < mean < 1
    assert numbers["eval/held/mean@6"] == pytest.approx(mean)
    error = math.sqrt(sum((value - mean) ** 2 for value in means) / 4 / 5)
    assert numbers["eval/held/mean@6_stderr"] == pytest.approx(error)
    for k in (1, 2, 6):
        subsets = [[any(chosen) for chosen in itertools.combinations(row, k)] for row in right]
        expected = sum(sum(passed) / len(passed) for passed in subsets) / 5
        assert numbers[f"eval/held/pass@{k}"] == pytest.approx(expected)
    assert [(name, total) for name, total, _ in told] == [("evaluate held", 5), ("sample held", 30)]


def test_votes_by_hand(ranks):
    """A wrong sample of this engine gives no answer: a vote of k is right unless all k are wrong."""
    [(numbers, _, _)] = ranks(1, lambda world: evaluate(world, samples=6, pass_k=(1, 3), maj_k=(1, 3)))
    for k in (1, 3):
        assert 0 < numbers[f"eval/held/pass@{k}"] < 1
        assert numbers[f"eval/held/maj@{k}"] == pytest.approx(numbers[f"eval/held/pass@{k}"])
        assert numbers[f"eval/held/maj@{k}_stderr"] == pytest.approx(numbers[f"eval/held/pass@{k}_stderr"])


def test_numbers_of_each_source_where_there_are_several(ranks):
    mixed = [row | {"data_source": "even" if number % 2 == 0 else "odd"} for number, row in enumerate(ROWS)]
    of_one = [row | {"data_source": "even"} for row in ROWS]
    [(numbers, _, _)] = ranks(1, lambda world: evaluate(world, 6, (1,), (3,), {"held": mixed, "one": of_one}))
    assert numbers["eval/held/accuracy"] == 0.6
    assert (numbers["eval/held/even/accuracy"], numbers["eval/held/odd/accuracy"]) == (1.0, 0.0)
    assert numbers["eval/held/even/length"] == 3.0 and "eval/held/even/length_stderr" not in numbers
    for name in ("form", "mean@6", "pass@1", "maj@3"):
        both = 3 * numbers[f"eval/held/even/{name}"] + 2 * numbers[f"eval/held/odd/{name}"]
        assert both / 5 == pytest.approx(numbers[f"eval/held/{name}"])
    assert not any(name.startswith("eval/one/even") for name in numbers)
    assert {name.split("/")[2] for name in numbers if name.count("/") == 3} == {"even", "odd"}


def test_a_row_without_a_source_is_of_another(ranks):
    rows = [ROWS[0] | {"data_source": "one"}, *ROWS[1:]]
    [(numbers, _, _)] = ranks(1, lambda world: evaluate(world, sets={"held": rows}))
    assert (numbers["eval/held/one/accuracy"], numbers["eval/held/other/accuracy"]) == (1.0, 0.5)


def test_what_is_measured_is_what_is_summed_up(ranks):
    @contextmanager
    def silent(name, total):
        yield lambda done: None

    def work(world):
        evaluator = make_evaluator(world, {"held": ROWS}, 4, (2,), (2,))
        return evaluator.evaluate(silent), evaluator.run(silent)

    [(sets, (numbers, _))] = ranks(1, work)
    assert summary(sets) == numbers
    held = sets["held"]
    assert held.metrics["accuracy"] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert [answers.extracted for answers in held.greedy] == [["0"], [None], ["2"], [None], ["4"]]
    assert [len(answers.texts) for answers in held.samples] == [4] * 5


@pytest.mark.parametrize(("samples", "pass_k", "maj_k"), [(0, (1, 4), ()), (6, (1, 2), (3,))])
def test_what_is_measured_is_known_before(samples, pass_k, maj_k, ranks):
    [(numbers, _, _)] = ranks(1, lambda world: evaluate(world, samples, pass_k, maj_k))
    known = metric_names(("right", "form"), "right", samples, list(pass_k), list(maj_k))
    names = [f"eval/held/{name}" for name in known]
    assert sorted(names) == sorted(name for name in numbers if not name.endswith("_stderr"))


@pytest.mark.parametrize("size", [2, 3, 7])
def test_ranks_agree_with_one_process(size, ranks):
    """Also where a rank has no row at all."""

    def work(world):
        return evaluate(world, samples=4, maj_k=(3,), sets={"held": ROWS, "other": ROWS[:2]})

    [alone] = ranks(1, work)
    for numbers, answers, _ in ranks(size, work):
        assert numbers == alone[0]
        assert answers == alone[1]


def unscored_of(texts, rows):
    """As `score`; the accuracy of prompt 1, and of every answer "no", could not be judged."""
    right, form = (values.clone() for values in score(texts, rows)[1].values())
    for number, (text, row) in enumerate(zip(texts, rows, strict=True)):
        if row["answer"] == "1" or text == "no":
            right[number] = math.nan
    return right + form, {"right": right, "form": form}


def test_answers_without_a_score_are_in_no_mean(ranks, monkeypatch):
    [(numbers, answers, _)] = ranks(
        1, lambda world: evaluate(world, samples=6, pass_k=(1, 4), maj_k=(4,), scored_by=unscored_of)
    )
    assert numbers["eval/held/accuracy"] == 1.0, "greedy: 0, 2, 4 are right, 1 and 3 are unscored"
    assert numbers["eval/held/unscored"] == pytest.approx(0.4)
    assert numbers["eval/held/form"] == pytest.approx(0.8), "the other term scored all of them"
    right = [[row_seed(SEED, number, sample) % 2 == 0 for sample in range(6)] for number in range(5)]
    known = [sum(row) for number, row in enumerate(right) if number != 1]  # the samples with a score, all of them right
    assert numbers["eval/held/mean@6"] == 1.0 if any(known) else "eval/held/mean@6" not in numbers
    assert ("eval/held/pass@4" in numbers) == any(count >= 4 for count in known)
    assert [row["score"] for row in answers["held"]] == [1.0, None, 1.0, None, 1.0]


def signed(acc=None, f1=None):
    """Scores of 1 and -1, with what the function returns besides for right and for wrong answers."""

    def score_all(texts, rows):
        right = torch.tensor([text == row["answer"] for text, row in zip(texts, rows, strict=True)])
        numbers = {
            f"right/{name}": torch.where(right, *map(torch.tensor, both))
            for name, both in (("acc", acc), ("f1", f1))
            if both is not None
        }
        value = torch.where(right, 1.0, -1.0)
        return Scores(value, {"right": value}, [{} for _ in texts], torch.zeros(len(texts), dtype=torch.bool), numbers)

    return lambda: ScoringAtEnd(score_all)


@pytest.mark.parametrize("size", [1, 3])
def test_the_accuracy_of_a_function_is_the_acc_that_it_returns(size, ranks, caplog):
    """Right on 0, 2 and 4: score (1 - 1 + 1 - 1 + 1) / 5, accuracy 3 / 5, f1 (3 * 0.75 + 2 * 0.25) / 5."""
    begin = signed(acc=(1.0, 0.0), f1=(0.75, 0.25))
    for numbers, texts, _ in ranks(size, lambda world: evaluate(world, samples=2, pass_k=(1,), begin=begin)):
        assert numbers["eval/held/accuracy"] == 0.6 and numbers["eval/held/score"] == pytest.approx(0.2)
        assert numbers["eval/held/right/f1"] == pytest.approx(0.55) and "eval/held/right/acc" not in numbers
        assert 0 <= numbers["eval/held/mean@2"] == numbers["eval/held/pass@1"] <= 1
        assert measured(numbers, "eval/held/accuracy") == 0.6
        assert [row["score"] for row in texts["held"]] == [1, 0, 1, 0, 1]
    assert not caplog.records


def test_values_that_are_no_accuracies_are_named_score_and_the_run_says_so_once(ranks, caplog):
    warn_once.cache_clear()
    for _ in range(2):
        [(numbers, _, _)] = ranks(1, lambda world: evaluate(world, begin=signed()))
    assert numbers["eval/held/score"] == pytest.approx(0.2) and "eval/held/accuracy" not in numbers
    for name in ("accuracy", "score"):
        assert metric_value(numbers, f"eval/held/{name}") == pytest.approx(0.2)
    [warning] = caplog.messages
    assert (
        warning.startswith("reward.accuracy=right: values below 0 or above 1 are no accuracies")
        and "{score, acc}" in warning
    )


def test_one_set_decides_the_name_for_all(ranks):
    sets = {"all_right": ROWS[:1], "held": ROWS}
    [(numbers, _, _)] = ranks(1, lambda world: evaluate(world, sets=sets, begin=signed()))
    assert (numbers["eval/all_right/score"], numbers["eval/held/score"]) == (1.0, pytest.approx(0.2))
    assert not any("accuracy" in name for name in numbers)


def test_a_number_of_a_term_gives_way_to_a_source_of_the_same_name(ranks):
    rows = [row | {"data_source": "right" if number % 2 == 0 else "odd"} for number, row in enumerate(ROWS)]
    begin = signed(acc=(1.0, 0.0), f1=(0.75, 0.25))
    [(numbers, _, _)] = ranks(1, lambda world: evaluate(world, sets={"held": rows}, begin=begin))
    assert numbers["eval/held/right/accuracy"] == 1.0 and numbers["eval/held/right/right/f1"] == 0.75
    assert "eval/held/right/f1" not in numbers


def test_numbers_of_an_earlier_evaluation_do_not_stay():
    last = {"loss/policy": 1.0, "eval/held/accuracy": 1.0}
    assert updated(last, {"loss/policy": 2.0}) == {"loss/policy": 2.0, "eval/held/accuracy": 1.0}
    assert updated(last, {"eval/held/score": -1.0}) == {"loss/policy": 1.0, "eval/held/score": -1.0}
