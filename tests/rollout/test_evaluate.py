"""Numbers of held-out sets, against numbers by hand."""

import itertools
import math
from contextlib import contextmanager

import pytest
import torch

from rft.rollout.engine import Completion, Sampling
from rft.rollout.evaluate import Evaluator, measured, pass_at_k, with_error
from rft.rollout.source import row_seed

ROWS = [{"prompt": f"{number}=", "answer": str(number)} for number in range(5)]
GREEDY = Sampling(4, 0.0, 1.0, 0, 0.0, [], None)
SAMPLED = Sampling(4, 1.0, 1.0, 0, 0.0, [], None)
SEED = 11


class Encoder:
    def prompts(self, rows):
        return [[int(row["answer"])] for row in rows]


class Engine:
    """Greedy: right on even prompts, with as many tokens as the prompt says. Sampled: right where the seed is even."""

    def generate(self, requests, sampling, progress):
        answers, done = [], 0
        for request in requests:
            [number] = request.prompt
            answers.append([self.answer(number, seed, sampling) for seed in request.seeds])
            done += len(request.seeds)
            progress(done)
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


def evaluate(world, samples=0, pass_k=(1, 4), sets=None):
    told = []

    @contextmanager
    def progress(name, total):
        told.append((name, total, shown := []))
        yield shown.append

    evaluator = Evaluator(
        world, Engine(), Encoder(), score, sets or {"held": ROWS}, "right", GREEDY, SAMPLED, samples, list(pass_k), SEED
    )  # fmt: skip
    return *evaluator.run(progress), told


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
    assert answers == {
        "held": [
            {"prompt": f"{n}=", "response": str(n) if n % 2 == 0 else "no", "score": float(n % 2 == 0)}
            for n in range(5)
        ]
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


@pytest.mark.parametrize(("samples", "pass_k"), [(0, (1, 4)), (6, (1, 2))])
def test_what_is_measured_is_known_before(samples, pass_k, ranks):
    [(numbers, _, _)] = ranks(1, lambda world: evaluate(world, samples, pass_k))
    names = [f"eval/held/{name}" for name in measured(("right", "form"), "right", samples, list(pass_k))]
    assert sorted(names) == sorted(name for name in numbers if not name.endswith("_stderr"))


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        answers = [1] * correct + [0] * (n - correct)
        subsets = [any(chosen) for chosen in itertools.combinations(answers, k)]
        assert pass_at_k(n, correct, k) == pytest.approx(sum(subsets) / len(subsets))


def test_the_error_of_a_mean_by_hand():
    # mean 2; squares 1 + 0 + 1 over 2 = 1; sqrt(1 / 3)
    assert with_error("x", [1.0, 2.0, 3.0]) == pytest.approx({"x": 2.0, "x_stderr": math.sqrt(1 / 3)})
    assert with_error("x", [0.5]) == {"x": 0.5, "x_stderr": 0.0}


@pytest.mark.parametrize("size", [2, 3, 7])
def test_ranks_agree_with_one_process(size, ranks):
    """Also where a rank has no row at all."""

    def work(world):
        return evaluate(world, samples=4, sets={"held": ROWS, "other": ROWS[:2]})

    [alone] = ranks(1, work)
    for numbers, answers, _ in ranks(size, work):
        assert numbers == alone[0]
        assert answers == alone[1]
