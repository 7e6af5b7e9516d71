"""Prompts chosen by their solve rate: what is tracked, what is drawn, and that ranks and restarts change nothing."""

import logging
from dataclasses import replace

import pytest
import torch

from rft.batch.columns import fields
from rft.metrics import Metrics
from rft.registry import convert
from rft.rollout.engine.base import Completion
from rft.rollout.engine.sampling import Sampling
from rft.rollout.source.curriculum import CurriculumSource, Forget, Priority, SolveRate
from rft.rollout.source.rollout import DynamicSampling, RolloutSource
from tests.data.contexts import check_context
from tests.helpers import hf_engine
from tests.rollout.contexts import NO_THOUGHTS, rollout_context
from tests.rollout.word_models import one_layer, word_tokenizer

ROWS = [{"prompt": f"{number}=", "answer": str(number)} for number in range(10)]
SAMPLING = Sampling(3, temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)
SEED = 5
FIXED = SolveRate(term="right", right=0.5, wrong=0.5, keep=0.75, forget=None)
FADING = SolveRate(term="right", right=0.5, wrong=0.5, keep=0.96, forget=Forget(half=0.04, least=0.875))


PLAIN = CurriculumSource.Options(redraw=None, interruption=None, tracking=FIXED, priority=None, retire=None)


class Encoder:
    thoughts = NO_THOUGHTS

    def prompts(self, rows):
        return [[int(row["answer"]) + 1] * (1 + int(row["answer"]) % 2) for row in rows]


class Engine:
    """Says the seed in as many tokens as it pleases."""

    def generate(self, requests, sampling, on_completion=None):
        return [[self.say(seed) for seed in request.seeds] for request in requests]

    def say(self, seed):
        tokens = [1 + seed % 5, 1 + seed % 7, 1 + seed % 11][: 1 + seed % 3]
        return Completion(tokens, [-0.5] * len(tokens), "stop", str(seed), [6] * len(tokens))


def parity(texts, rows):
    """An answer is right where its seed is odd, prompts below 3 always, prompt 9 never."""
    right = [
        1.0 if int(row["answer"]) < 3 else 0.0 if row["answer"] == "9" else float(int(text) % 2)
        for text, row in zip(texts, rows, strict=True)
    ]
    return torch.tensor(right), {"right": torch.tensor(right)}


class Policy:
    """Of every token the policy says the token's number times a heat that the test changes."""

    def __init__(self):
        self.heat = -0.01
        self.asked = []

    def __call__(self, batch):
        assert batch["loss_mask"].dtype == torch.bool and len(set(batch["unit"].tolist())) == len(batch)
        self.asked.append(len(batch))
        return torch.where(batch["loss_mask"], self.heat * batch["tokens", "input_ids"], 0.0).float()


def source(
    world,
    tracking=FIXED,
    priority=None,
    retire=None,
    group=4,
    prompts=4,
    redraw=None,
    score=parity,
    policy=None,
    interruption=None,
):
    policy = policy or Policy()
    context = rollout_context(
        world, Engine(), Encoder(), ROWS, prompts, group, SAMPLING, SEED, score=score, logprobs=policy
    )
    changes = {"redraw": redraw, "interruption": interruption, "priority": priority, "retire": retire}
    return CurriculumSource(replace(PLAIN, tracking=tracking, **changes), context)


def rates(mine):
    return (mine._counts[:, 0] / mine._counts.sum(1)).tolist()


def test_rates_by_hand(ranks):
    """With all rows in every step each is visited once a step; the baseline is what was known before."""

    def work(world):
        mine = source(world, prompts=10)
        first, second = mine.next(Metrics()), mine.next(Metrics())
        assert set(first.keys()) == set(PLAIN.facts().writes)
        right = {row: [0.5, 0.5] for row in range(10)}
        for batch in (first, second):
            before = {row: r / (r + w) for row, (r, w) in right.items()}
            for place, row in enumerate(map(int, (row["answer"] for row in fields(batch)))):
                assert batch["baseline_scores"][place] == pytest.approx(before[row])
                if place % 4 == 0:
                    solved = float(batch["terms", "right"][place : place + 4].sum())
                    right[row] = [0.75 * right[row][0] + solved, 0.75 * right[row][1] + 4 - solved]
        assert rates(mine) == pytest.approx([r / (r + w) for r, w in right.values()])
        assert rates(mine)[0] == pytest.approx(7.28125 / 7.5625) and rates(mine)[9] == pytest.approx(0.28125 / 7.5625)
        return True

    assert ranks(1, work) == [True]


def test_a_prompt_that_comes_twice_in_a_step_is_learnt_of_in_order(ranks):
    def work(world):
        mine = source(world, prompts=20)
        batch = mine.next(Metrics())
        parts = world.gather((batch["group"], batch["terms", "right"], fields(batch)))
        return parts, mine._counts

    for parts, counts in ranks(2, work):
        expected = torch.full((10, 2), 0.5, dtype=torch.float64)
        groups = {}
        for group, right, rows in parts:
            for place in range(0, len(group), 4):
                groups[int(group[place])] = (int(rows[place]["answer"]), float(right[place : place + 4].sum()))
        for _, (row, solved) in sorted(groups.items()):
            expected[row] = 0.75 * expected[row] + torch.tensor([solved, 4 - solved])
        assert torch.equal(counts, expected)


def test_epochs_draw_what_the_plain_source_draws(ranks):
    def work(world):
        context = rollout_context(world, Engine(), Encoder(), ROWS, 4, 4, SAMPLING, SEED, score=parity)
        plain = RolloutSource(RolloutSource.Options(redraw=None, interruption=None), context)
        mine = source(world)
        for _ in range(4):
            a, b = plain.next(Metrics()), mine.next(Metrics())
            assert [row["text"] for row in fields(a)] == [row["text"] for row in fields(b)]
            assert torch.equal(a["unit"], b["unit"])

    ranks(1, work)


def test_the_share_that_stays():
    assert FIXED.share(9.0) == 0.75
    assert [FADING.share(change) for change in (0.0, 0.001, 9.0)] == [0.96, 0.96, 0.875]
    assert FADING.share(0.004) == pytest.approx(2**-0.1)


def test_old_counts_fade_by_how_far_the_policy_has_moved(ranks):
    def work(world):
        policy = Policy()
        mine = source(world, FADING, prompts=10, policy=policy)
        numbers, batches, counts = [], [], [mine._counts.clone()]
        for heat in (-0.01, -0.0105, -0.0125):
            policy.heat = heat
            metrics = Metrics()
            batches.append(mine.next(metrics))
            counts.append(mine._counts.clone())
            numbers.append(metrics.reduce(world.gather))
        assert policy.asked == [10, 20, 20], "the answers of this step and those of the last visit"
        assert "rollout/policy_change" not in numbers[0]
        shares = []
        for step in (1, 2):
            changes = []
            for place in range(0, 40, 4):
                row = int(fields(batches[step])[place]["answer"])
                last = next(i for i in range(0, 40, 4) if int(fields(batches[step - 1])[i]["answer"]) == row)
                tokens = batches[step - 1]["tokens", "input_ids"][last][batches[step - 1]["response_mask"][last]]
                changes.append((0.0005, 0.002)[step - 1] * float(tokens.double().mean()))
                share = min(0.96, max(0.875, 2 ** (-changes[-1] / 0.04)))
                shares.append(share)
                solved = float(batches[step]["terms", "right"][place : place + 4].sum())
                new = torch.tensor([solved, 4 - solved]).double()
                torch.testing.assert_close(counts[step + 1][row], share * counts[step][row] + new, rtol=0, atol=1e-6)
            assert numbers[step]["rollout/policy_change"] == pytest.approx(sum(changes) / 10)
        assert min(shares) == 0.875 and max(shares) == 0.96 and len(set(shares)) > 4
        return True

    assert ranks(1, work) == [True]


def test_open_prompts_come_more_often(ranks):
    def work(world):
        mine = source(world, priority=Priority(floor=0.05), prompts=2)
        seen = torch.zeros(10)
        for step in range(600):
            for row in {int(row["answer"]) for row in fields(mine.next(Metrics()))}:
                seen[row] += step > 100
        return seen

    [seen] = ranks(1, work)
    assert seen.min() > 0, "the floor loses none"
    assert seen[3:9].min() > 2 * seen[[0, 1, 2, 9]].max()


def test_solved_prompts_are_not_drawn_again(ranks):
    def work(world):
        mine = source(world, SolveRate("right", 0.5, 0.5, keep=0.0, forget=None), retire=0.9, prompts=10)
        numbers = []
        for _ in range(3):
            metrics = Metrics()
            before = {row for row, rate in enumerate(rates(mine)) if rate >= 0.9}
            drawn = {int(row["answer"]) for row in fields(mine.next(metrics))}
            assert not drawn & before
            numbers.append(metrics.reduce(world.gather)["rollout/retired"])
            assert numbers[-1] == pytest.approx(len(before) / 10)
        assert before >= {0, 1, 2} and numbers == sorted(numbers)
        return mine.row_sampler.position

    assert ranks(1, work) == ranks(2, work)[:1]


def test_where_all_are_solved_all_come_back(ranks, caplog):
    def everything(texts, rows):
        return torch.ones(len(texts)), {"right": torch.ones(len(texts))}

    def work(world):
        mine = source(world, retire=0.8, prompts=10, score=everything)
        mine.next(Metrics())
        assert min(rates(mine)) >= 0.8
        return len(mine.next(Metrics()))

    with caplog.at_level(logging.WARNING):
        assert ranks(1, work) == [40]
    assert "algorithm.source.retire=0.8; all of them are drawn again" in caplog.text


OPTIONS = [
    {"tracking": FADING, "priority": Priority(0.05), "group": 1},
    {"tracking": FADING, "priority": Priority(0.05), "retire": 0.8, "prompts": 16},  # more than there are prompts
    {"tracking": FADING, "redraw": DynamicSampling("right", None, 3)},
    {"tracking": FIXED, "retire": 0.9},
]


def step(mine, heat):
    """One step of a policy that moves; what was drawn, by unit."""
    mine.context.logprobs.heat = heat
    batch = mine.next(Metrics())
    texts = [row["text"] for row in fields(batch)]
    return dict(zip(batch["unit"].tolist(), zip(texts, batch["baseline_scores"].tolist(), strict=True), strict=True))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_what_one_rank_draws(size, options, ranks):
    def work(world):
        mine = source(world, **options)
        return [step(mine, -0.01 - 0.003 * number) for number in range(4)], mine._counts

    [(alone, counts)] = ranks(1, work)
    shared = ranks(size, work)
    for number in range(4):
        parts = [steps[number] for steps, _ in shared]
        assert {unit: text for part in parts for unit, text in part.items()} == alone[number]
    assert all(torch.equal(theirs, counts) for _, theirs in shared)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("wrote", "reads"), [(1, 1), (1, 2), (4, 2)])
def test_a_source_goes_on_where_it_was(wrote, reads, options, ranks):
    def first(world):
        saved = source(world, **options)
        for number in range(3):
            step(saved, -0.01 - 0.003 * number)
        return saved.state_dict(), [step(saved, -0.03), step(saved, -0.04)], saved._counts

    def second(world, state):
        restored = source(world, **options)
        restored.load_state_dict(state)
        return [step(restored, -0.03), step(restored, -0.04)], restored._counts

    found = ranks(wrote, first)
    again = ranks(reads, lambda world: second(world, found[0][0]))
    for number in (0, 1):
        expected = {unit: text for _, steps, _ in found for unit, text in steps[number].items()}
        assert {unit: text for steps, _ in again for unit, text in steps[number].items()} == expected
    assert all(torch.equal(counts, found[0][2]) for _, counts in again)


@pytest.mark.parametrize("wrong", [2.0, -0.5])
def test_only_a_share_can_be_tracked(wrong, ranks):
    def score(texts, rows):
        return torch.zeros(len(texts)), {"right": torch.full((len(texts),), wrong)}

    with pytest.raises(ValueError, match=rf"^algorithm\.source\.tracking\.term=right: .* it was {wrong} to {wrong}; "):
        ranks(1, lambda world: source(world, score=score).next(Metrics()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"right": 0.0}, r"^tracking\.right=0\.0: it must be above 0"),
        ({"keep": 1.5}, r"^tracking\.keep=1\.5: it must be at most 1"),
        (
            {"keep": 0.5, "forget": {"half": 0.1, "least": 0.6}},
            r"^algorithm\.source\.tracking\.keep=0\.5: it must be at least forget\.least=0\.6",
        ),
        ({"forget": {"half": 0.0, "least": 0.6}}, r"^tracking\.forget\.half=0\.0: it must be above 0$"),
    ],
)
def test_numbers_out_of_range_are_refused(changes, message):
    node = {"term": "right", "right": 0.5, "wrong": 0.5, "keep": 0.9, "forget": None} | changes
    with pytest.raises(ValueError, match=message):
        convert(node, SolveRate, "tracking")


def test_its_facts():
    facts = PLAIN.facts()
    assert facts.sampled == "always" and facts.scores and facts.given is None and facts.fields == ("prompt",)
    parent = RolloutSource.Options(redraw=None, interruption=None).facts()
    assert set(facts.writes) == {*parent.writes, "baseline_scores"}


@pytest.mark.parametrize(
    ("changes", "run", "message"),
    [
        ({}, {"terms": ("left",)}, r"^algorithm\.source\.tracking\.term=right: none of reward\.terms, which are left"),
        (
            {"priority": Priority(0.1)},
            {"mixture": True},
            r"^data\.train is a mixture, and algorithm\.source\.priority ",
        ),
        ({"priority": Priority(0.1)}, {"shuffle": False}, r"^data\.shuffle=false: algorithm\.source\.priority draws"),
        ({}, {"streaming": 8}, r"^data\.streaming=8: algorithm\.source\.tracking counts"),
        ({"redraw": DynamicSampling("left", None, 2)}, {}, r"^algorithm\.source\.redraw\.term=left: none of"),
    ],
)
def test_what_cannot_be_tracked_is_refused_before_a_model_is_loaded(changes, run, message):
    PLAIN.check(check_context(mixture=True, shuffle=False))
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **changes).check(check_context(**run))


def test_with_a_real_engine_the_change_is_that_of_its_own_weights(ranks):
    """A model of ours samples; between two visits its weights change, and the counts fade by just that."""
    tokenizer, model = word_tokenizer(16), one_layer()
    sampling = Sampling(6, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)

    @torch.no_grad()
    def logprobs(batch):
        logits = model(**batch["tokens"]).logits.log_softmax(-1)
        said = logits[:, :-1].gather(2, batch["tokens", "input_ids"][:, 1:, None])[..., 0]
        return torch.where(batch["loss_mask"], torch.cat([torch.zeros(len(said), 1), said], 1), 0.0)

    def score(texts, rows):
        right = torch.tensor([float("w3" in text) for text in texts])
        return right, {"right": right}

    def work(world):
        engine = hf_engine(model, tokenizer, 64)
        context = rollout_context(world, engine, Encoder(), ROWS, 10, 1, sampling, SEED, score=score, logprobs=logprobs)
        tracking = SolveRate("right", 0.5, 0.5, keep=1.0, forget=Forget(half=0.06, least=0.01))
        mine = CurriculumSource(replace(PLAIN, tracking=tracking), context)
        first = mine.next(Metrics())
        sampled = first["response_mask"]
        for row, answer in enumerate(fields(first)):
            kept = mine._visits[int(answer["answer"])].logprobs
            torch.testing.assert_close(kept, first["rollout_logprobs"][row][sampled[row]], rtol=0, atol=1e-4)
        before = mine._counts.clone()
        with torch.no_grad():
            model.lm_head.weight.mul_(1.02)
        first["loss_mask"] = sampled
        change = (logprobs(first) - first["rollout_logprobs"]).abs().sum(-1) / sampled.sum(-1)
        second = mine.next(Metrics())
        new = {int(answer["answer"]): right for answer, right in zip(fields(second), second["scores"], strict=True)}
        for row, answer in enumerate(fields(first)):
            number = int(answer["answer"])
            share = 2.0 ** (-float(change[row]) / 0.06)
            assert 0.05 < share < 0.999
            expected = share * before[number] + torch.tensor([new[number], 1 - new[number]]).double()
            torch.testing.assert_close(mine._counts[number], expected, rtol=0, atol=1e-2)
        return True

    assert ranks(1, work) == [True]


def test_positions_of_a_cursor_that_passes_over_stay_unique(ranks):
    def work(world):
        mine = source(world, SolveRate("right", 0.5, 0.5, keep=0.0, forget=None), retire=0.9)
        return [group for _ in range(8) for group in mine.next(Metrics())["group"].tolist()[::4]]

    [groups] = ranks(1, work)
    assert len(set(groups)) == len(groups) == 32
    assert max(groups) > 31, "retired prompts are to be passed over"
