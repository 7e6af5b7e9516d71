"""Responses to canary tasks: their mean accuracy by hand, and when a run stops."""

from contextlib import contextmanager

import pytest

from rft.batch.thoughts import PromptThoughts
from rft.data.encode.tokenizer import characters_and_tokens
from rft.distributed import SINGLE_PROCESS
from rft.evaluation.base import CanaryResult
from rft.evaluation.canary import CanaryProbe
from rft.reward.compose import CanaryOptions
from rft.rollout.engine.base import Completion
from rft.rollout.engine.sampling import Sampling
from tests.reward.reward_of import reward_of
from tests.rollout.contexts import NO_THOUGHTS

ROWS = [{"prompt": f"{number} =", "answer": answer} for number, answer in enumerate(("even", "never", "odd"))]
SAMPLED = Sampling(4, 0.7, 1.0, 0, 0.0, [], None)
EXACT = {"exact_match": {"name": "exact_match", "weight": 2.0, "strip": True}}


class Encoder:
    thoughts = NO_THOUGHTS

    def prompts(self, rows):
        return [[ROWS.index(row)] for row in rows]


class Sampler:
    """Answers with the parity of the sample's seed, and keeps what it was asked."""

    def __init__(self):
        self.seeds = {}

    def generate(self, requests, sampling, on_completion):
        assert sampling is SAMPLED
        self.seeds |= {request.prompt[0]: request.seeds for request in requests}
        found = [[self._answer(seed) for seed in request.seeds] for request in requests]
        for place, group in enumerate(found):
            for sample, completion in enumerate(group):
                on_completion(place, sample, completion)
        return found

    def _answer(self, seed):
        return Completion([1], [-1.0], "stop", "odd" if seed % 2 else "even", [0])


@contextmanager
def silent(name, total):
    yield lambda done: None


def probe(world, sampler, bound=0.2, reward=None):
    reward = reward or reward_of(EXACT, "exact_match")
    reward.canary = CanaryOptions("canary.jsonl", {}, 5, 4, bound)
    return CanaryProbe(
        world=world, encoder=Encoder(), sampler=sampler, reward=reward, rows=ROWS, sampling=SAMPLED, seed=3
    )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_mean_accuracy_by_hand(size, ranks):
    def work(world):
        sampler = Sampler()
        return probe(world, sampler).run(10, silent), sampler.seeds

    found = ranks(size, work)
    seeds = {number: own for _, asked in found for number, own in asked.items()}
    assert sorted(seeds) == [0, 1, 2] and len({seed for own in seeds.values() for seed in own}) == 12
    right = sum(seed % 2 == 0 for seed in seeds[0]) + sum(seed % 2 for seed in seeds[2])
    for result, _ in found:
        assert result == found[0][0]
        assert result.accuracy == pytest.approx(right / 12) and len(result.texts) == 12
        accuracies = [record["accuracy"] for record in result.texts]
        assert accuracies == [1.0] * right + [0.0] * (12 - right)
        assert result.texts[0].keys() == {"prompt", "response", "score", "accuracy"} and result.texts[0]["score"] == 2.0


def test_a_right_response_counts_1_whatever_a_wrong_one_costs(ranks):
    """The value -1 of a wrong response takes nothing from the share of right ones."""
    signed = reward_of({"judge": {"function": f"{__file__}:signed", "weight": 1.0}}, "judge")
    [plain] = ranks(1, lambda world: probe(world, Sampler()).run(10, silent))
    [found] = ranks(1, lambda world: probe(world, Sampler(), reward=signed).run(10, silent))
    assert 0 < found.accuracy == plain.accuracy < 1
    assert {record["score"] for record in found.texts} == {1.0, -1.0}


def test_an_answer_in_a_thought_that_the_prompt_opened_is_none(monkeypatch):
    """The prompt of the last task is the token `<think>`: its answers stand in a thought that does not end."""
    monkeypatch.setattr(Encoder, "thoughts", PromptThoughts(characters_and_tokens(alphabet="x", special=["<think>"])))
    monkeypatch.setattr(Encoder, "prompts", lambda self, rows: [[3 * (row is ROWS[2])] for row in rows])
    results = [probe(SINGLE_PROCESS, Sampler()).run(step, silent) for step in range(5)]
    assert {record["prompt"] for result in results for record in result.texts if record["accuracy"]} == {"0 ="}


def test_other_steps_have_other_samples(ranks):
    def work(world):
        samplers = [Sampler(), Sampler(), Sampler()]
        for step, sampler in zip((5, 10, 10), samplers, strict=True):
            probe(world, sampler).run(step, silent)
        return [sampler.seeds for sampler in samplers]

    [(first, second, again)] = ranks(1, work)
    assert first != second == again


def test_the_run_stops_above_the_bound_alone(ranks):
    [canary] = ranks(1, lambda world: probe(world, Sampler()))
    assert [step for step in range(1, 12) if canary.due(step)] == [5, 10]
    record = {"prompt": "0 =", "response": "x" * 500, "score": 2.0, "accuracy": 1.0}
    wrong = record | {"accuracy": 0.0, "response": "wrong"}
    assert canary.problem(CanaryResult(None, [])) == canary.problem(CanaryResult(0.2, [record])) == ""
    problem = canary.problem(CanaryResult(0.25, [record, wrong]))
    assert problem.startswith("reward/canary=0.25 is above reward.canary.bound=0.2: ")
    assert problem.endswith(f"\nprompt '0 =', response '{'x' * 400}...', score 2, accuracy 1")


def test_responses_without_a_score_are_in_no_mean(ranks):
    broken = {"function": "tests.evaluation.test_canary:judge", "weight": 1.0, "call": {"failed": "drop_row"}}
    reward = reward_of({**EXACT, "broken": broken}, "broken")
    [result] = ranks(1, lambda world: probe(world, Sampler(), reward=reward).run(5, silent))
    assert result.accuracy == 0.5 and len(result.texts) == 12
    assert [record["accuracy"] for record in result.texts] == [0.5] * 8 + [None] * 4
    assert all("reward/exact_match" in record for record in result.texts)


def judge(response, row):
    """Cannot judge the second task."""
    return 0.5 if row["answer"] != "never" else 1 / 0


def signed(response, row):
    return 1.0 if response == row["answer"] else -1.0
