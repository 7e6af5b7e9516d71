"""Answers that are interrupted: what is asked of the engine, what becomes of it, and whose numbers a row holds."""

import functools
from dataclasses import replace

import pytest
import torch

from rft.batch.columns import fields
from rft.batch.trajectory import Finish, Segment, Trajectory, to_row
from rft.data.encode.encoder import Encoder
from rft.metrics import Metrics
from rft.registry import convert
from rft.rollout.answers import Answer
from rft.rollout.engine.base import Completion, Request, row_seed
from rft.rollout.engine.hf import HFEngine
from rft.rollout.engine.sampling import FirstToken, Sampling
from rft.rollout.forced_stop import ForcedStop
from rft.rollout.interruption import Interruption
from rft.rollout.source.curriculum import CurriculumSource, Forget, SolveRate
from rft.rollout.source.rollout import RolloutSource
from rft.setup.assembly import Job
from tests.data.contexts import check_context
from tests.helpers import hf_engine
from tests.rollout.contexts import rollout_context
from tests.rollout.word_models import one_layer, word_tokenizer

SAMPLING = Sampling(20, temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=FirstToken(30.0, 16))
TIME = ForcedStop(after=[0.4, 0.6], phrase="time")
PHRASE = [90, 91, 92]
SEEDS = list(range(100, 140))


class Engine:
    """Answers with as many tokens as it may, or, of a seed that three divides, with two and the end."""

    def __init__(self):
        self.calls = []

    def generate(self, requests, sampling, on_completion=None):
        self.calls.append((requests, sampling))
        found = [
            [self.say(seed, limit) for seed, limit in zip(request.seeds, request.limits, strict=True)]
            for request in requests
        ]
        for number, group in enumerate(found):
            for sample, completion in enumerate(group):
                on_completion(number, sample, completion)
        return found

    def say(self, seed, limit):
        size, reason = (2, "stop") if seed % 3 == 0 and limit >= 2 else (limit, "length")
        return Completion([seed % 50] * size, [-0.25] * size, reason, f"{seed}.", [6 + len(self.calls)] * size)


def generated(time=TIME, requests=None, phrase=PHRASE, sampling=SAMPLING):
    announced = {}
    engine = Engine()
    requests = requests or [Request([5, 6], SEEDS[:25], order=3), Request([7], SEEDS[25:], order=4)]

    def announce(request, sample, answer):
        assert (request, sample) not in announced
        announced[request, sample] = answer.finish.text

    found = Interruption(time, phrase).generate(engine, requests, sampling, announce)
    texts = {(i, j): one.finish.text for i, group in enumerate(found) for j, one in enumerate(group)}
    assert announced == texts, "every text is announced once, when it is whole"
    return engine, requests, found


def test_what_is_too_long_is_interrupted_and_goes_on():
    engine, requests, found = generated()
    (first, how), (second, how_later) = engine.calls
    assert how is SAMPLING and how_later.first_token is None and how_later.temperature == 0.7
    assert [(r.prompt, r.seeds) for r in first] == [(r.prompt, r.seeds) for r in requests]
    assert [len(group) for group in found] == [25, 15]
    limits = {seed: limit for r in first for seed, limit in zip(r.seeds, r.limits, strict=True)}
    assert {*limits.values()} == {8, 9, 10, 11, 12}, "every length from 0.4 to 0.6 of 20"
    later = iter(second)
    for request, group in zip(requests, found, strict=True):
        for seed, answer in zip(request.seeds, group, strict=True):
            if seed % 3 == 0:
                whole = Segment([seed % 50] * 2, True, [-0.25] * 2, [7, 7])
                assert answer == Answer([whole], Finish("stop", f"{seed}."))
                continue
            size, asked = limits[seed], next(later)
            assert asked.prompt == request.prompt + [seed % 50] * size + PHRASE
            assert asked.limits == [20 - size - 3] and asked.order == request.order
            [again] = asked.seeds
            assert again == row_seed(seed, 0, 1) != seed
            rest = 2 if again % 3 == 0 else 20 - size - 3
            start = Segment([seed % 50] * size, True, [-0.25] * size, [7] * size)
            end = Segment([again % 50] * rest, True, [-0.25] * rest, [8] * rest, continues=True)
            assert answer.segments == [start, Segment(PHRASE, trains=False, continues=True), end]
            assert answer.finish == Finish("stop" if again % 3 == 0 else "length", f"{seed}.time{again}.")
            assert size + 3 + rest <= 20 and (size + 3 + rest == 20) == (again % 3 != 0)
            trajectory = answer.trajectory(request.prompt, {})
            assert trajectory.turns == trajectory.forced_stops == 1
    assert next(later, None) is None


def test_a_row_depends_on_its_own_seed_alone():
    _, _, together = generated()
    for place, seed in enumerate(SEEDS[:25]):
        assert generated(requests=[Request([5, 6], [seed])])[2] == [[together[0][place]]]


@pytest.mark.parametrize(("most", "limits"), [(5, {1}), (6, {2}), (7, {3}), (8, {3, 4}), (10, {4, 5, 6})])
def test_there_is_room_for_the_phrase_and_a_token(most, limits):
    sampling = Sampling(most, 1.0, 1.0, 0, 0.0, [], None)
    engine, _, found = generated(sampling=sampling)
    assert {limit for request in engine.calls[0][0] for limit in request.limits} == limits
    lengths = [[len(part.tokens) for part in answer.segments] for group in found for answer in group]
    assert all(sum(parts) <= most for parts in lengths)
    assert all(request.limits[0] >= 1 for request in engine.calls[1][0])


def test_equal_shares_are_one_length():
    engine, _, _ = generated(ForcedStop([0.5, 0.5], "time"))
    assert {limit for request in engine.calls[0][0] for limit in request.limits} == {10}


def test_the_row_reads_the_phrase_and_does_not_train_it():
    start, end = Completion([7, 8], [-0.25, -1.5], "length", "sa", [3, 3]), Completion([9], [-0.5], "length", "d", [4])
    answer = Interruption(TIME, [90]).joined(start, end)
    assert answer.finish == Finish("length", "satimed") and answer.tokens == [7, 8, 90, 9]
    segments = [Segment([5, 6], trains=False), *answer.segments]
    row = to_row(Trajectory(segments, answer.finish, {}), group=0, unit=0, turns=True)
    assert row["tokens"]["input_ids"].tolist() == [5, 6, 7, 8, 90, 9]
    assert row["tokens"]["attention_mask"].tolist() == [1] * 6
    assert row["response_mask"].tolist() == [False, False, True, True, False, True]
    assert row["rollout_logprobs"].tolist() == [0, 0, -0.25, -1.5, 0, -0.5]
    assert row["turn"].tolist() == [0, 0, 1, 1, 1, 1]
    assert row["truncated"] is True


@pytest.mark.parametrize("after", [[0.5], [0.5, 0.6, 0.7], [0.0, 0.5], [0.6, 0.5], [0.5, 1.0]])
def test_shares_that_are_none_are_refused(after):
    with pytest.raises(ValueError, match=r"^algorithm\.source\.interruption\.after"):
        convert({"after": after, "phrase": "time"}, ForcedStop, "algorithm.source.interruption")


def test_an_empty_phrase_is_refused():
    with pytest.raises(ValueError, match=r"^algorithm\.source\.interruption\.phrase is empty"):
        ForcedStop([0.5, 0.5], "")


# With a model


@functools.cache  # ranks are threads, and share the seed of torch
def model():
    return one_layer()


def said(network, batch):
    """What the model says of every token but the first, (B, T) with 0 in front."""
    logits = network(**batch["tokens"]).logits.log_softmax(-1)
    chosen = logits[:, :-1].gather(2, batch["tokens", "input_ids"][:, 1:, None])[..., 0]
    return torch.cat([torch.zeros(len(chosen), 1), chosen], 1)


ROWS = [{"prompt": " ".join(["w3"] * (1 + number % 2) + [f"w{number + 4}"])} for number in range(8)]
NUMBERS = Sampling(12, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)


def words(texts, rows):
    right = torch.tensor([float("w3" in text) for text in texts])
    return right, {"right": right}


def with_a_model(world, prompts=8, columns=(), max_rows=64):
    encoder = Encoder(word_tokenizer(16), "none", None)
    engine = hf_engine(model(), word_tokenizer(16), max_rows)
    context = rollout_context(world, engine, encoder, ROWS, prompts, 4, NUMBERS, 5, score=words, columns=columns)
    return RolloutSource(RolloutSource.Options(redraw=None, interruption=ForcedStop([0.4, 0.6], "w6 w7")), context)


@torch.no_grad()
def test_the_log_probabilities_of_a_row_are_those_of_one_forward_over_it(ranks):
    def work(world):
        metrics = Metrics()
        batch = with_a_model(world).next(metrics)
        return batch, metrics.reduce(world.gather)

    [(batch, numbers)] = ranks(1, work)
    sampled = batch["response_mask"]
    assert set(batch.keys()) == set(RolloutSource.Options(redraw=None, interruption=None).facts().writes)
    torch.testing.assert_close(batch["rollout_logprobs"], said(model(), batch) * sampled, rtol=0, atol=1e-5)
    ids, attended = batch["tokens", "input_ids"], batch["tokens", "attention_mask"].bool()
    interrupted = 0
    for row, text in enumerate(fields(batch)):
        begin = int(sampled[row].int().argmax())
        given = attended[row] & ~sampled[row] & (torch.arange(ids.shape[1]) > begin)
        assert ids[row][given].tolist() in ([], [6, 7])
        assert ("w6w7" in text["text"].replace(" ", "")) or not given.any()
        total = int(attended[row].sum()) - begin
        assert total <= 12
        assert bool(batch["truncated"][row]) == (total == 12 and ids[row][attended[row]][-1] != 2)
        interrupted += int(given.any())
    assert 0 < interrupted < len(batch)
    assert numbers["rollout/interrupted"] == pytest.approx(interrupted / len(batch))


@pytest.mark.parametrize(("size", "max_rows"), [(2, 64), (4, 3)])
def test_ranks_and_waves_change_no_answer(size, max_rows, ranks):
    def texts(world, rows=64):
        batch = with_a_model(world, max_rows=rows).next(Metrics())
        return dict(zip(batch["unit"].tolist(), [row["text"] for row in fields(batch)], strict=True))

    [alone] = ranks(1, texts)
    shared = ranks(size, lambda world: texts(world, max_rows))
    assert {unit: text for part in shared for unit, text in part.items()} == alone


def test_a_greedy_baseline_is_interrupted_as_the_answers_that_it_is_compared_with(ranks, monkeypatch):
    asked = []
    generate = HFEngine.generate

    def watch(engine, requests, sampling, on_completion=None):
        asked.append((sampling.temperature, sum(len(request.seeds) for request in requests)))
        return generate(engine, requests, sampling, on_completion)

    monkeypatch.setattr(HFEngine, "generate", watch)
    ranks(1, lambda world: with_a_model(world, columns=("greedy_scores",)).next(Metrics()))
    assert [temperature for temperature, _ in asked] == [1.0, 1.0, 0.0, 0.0]
    assert asked[0][1] == 32 and asked[2][1] == 8


def test_the_change_of_a_policy_is_measured_on_what_it_sampled(ranks):
    """A policy that says the same of sampled tokens and another thing of the phrase has not changed."""
    heat = [0.0]

    def logprobs(batch):
        assert not (batch["loss_mask"] & (batch["tokens", "input_ids"] == 6)).any()
        return torch.where(batch["loss_mask"], -0.01, heat[0]).float()

    class Words:
        def generate(self, requests, sampling, on_completion=None):
            return [[Completion([8, 9], [-1.0, -1.0], "length", "x", [0, 0]) for _ in r.seeds] for r in requests]

    def work(world):
        encoder, stop = Encoder(word_tokenizer(16), "none", None), ForcedStop([0.4, 0.6], "w6 w7")
        context = rollout_context(world, Words(), encoder, ROWS, 8, 2, NUMBERS, 5, score=words, logprobs=logprobs)
        tracking = SolveRate("right", 0.5, 0.5, keep=1.0, forget=Forget(half=0.01, least=0.0))
        options = {"tracking": tracking, "priority": None, "retire": None}
        mine = CurriculumSource(CurriculumSource.Options(redraw=None, interruption=stop, **options), context)
        mine.next(Metrics())
        heat[0] = -5.0
        metrics = Metrics()
        batch = mine.next(metrics)
        assert batch["response_mask"].sum(-1).tolist() == [4] * 16
        return metrics.reduce(world.gather)["rollout/policy_change"]

    assert ranks(1, work) == [0.0]


def test_a_phrase_without_room_is_refused_before_a_model_is_loaded():
    encoder = Encoder(word_tokenizer(16), "none", None)
    options = RolloutSource.Options(redraw=None, interruption=ForcedStop([0.5, 0.5], "w6 w7"))
    options.check_tokens(check_context(max_new_tokens=4, cap_key="a.key"), encoder)
    replace(options, interruption=None).check_tokens(check_context(max_new_tokens=1, cap_key="a.key"), encoder)
    with pytest.raises(
        ValueError, match=r"^algorithm\.source\.interruption\.phrase has 2 tokens.* a\.key=3; .*raise a\.key "
    ):
        options.check_tokens(check_context(max_new_tokens=3, cap_key="a.key"), encoder)


def test_a_run_is_refused_by_it_and_evaluations_are_never_interrupted(tiny, monkeypatch):
    """The engine is asked without limits of its own wherever nothing trains."""
    with pytest.raises(ValueError, match=r"^algorithm\.source\.interruption\.phrase has 1 tokens.*max_new_tokens=2;"):
        Job(tiny("algorithm=scale_rl", "rollout.max_new_tokens=2")).fit("")
    dialogues = ("environment=marked_calculator", "data=products", 'actor.tokenizer.alphabet="0123456789*=?"')
    with pytest.raises(ValueError, match=r"phrase has 1 tokens.* environment\.max_tokens=2; shorten it, raise env"):
        Job(tiny("algorithm=scale_rl", *dialogues, "environment.max_tokens=2")).fit("")
    asked = []
    generate = HFEngine.generate

    def watch(engine, requests, sampling, on_completion=None):
        limited = {request.limits is not None for request in requests}
        asked.append((sampling.temperature, limited))
        return generate(engine, requests, sampling, on_completion)

    monkeypatch.setattr(HFEngine, "generate", watch)
    Job(tiny("algorithm=scale_rl", "steps=1", "warmup=none")).fit("")
    assert [limited for temperature, limited in asked if temperature == 0] == [{False}, {False}]
    assert [limited for temperature, limited in asked if temperature > 0] == [{True}, {True}]
