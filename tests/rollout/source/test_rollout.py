"""Batches of sampled text: who draws which prompt, and how groups without signal are drawn again."""

import io
import logging
import math
from dataclasses import replace

import pytest
import torch

from rft.batch.columns import SOURCE_COLUMNS, fields
from rft.batch.media import media_entries
from rft.batch.trajectory import to_row
from rft.data.sampler import RowSampler
from rft.metrics import Metrics
from rft.registry import convert
from rft.rollout.answers import uncut
from rft.rollout.engine.base import Completion, row_seed
from rft.rollout.engine.sampling import FirstToken, Sampling
from rft.rollout.forced_stop import ForcedStop
from rft.rollout.source.dynamic_sampling import keeps
from rft.rollout.source.rollout import DynamicSampling, RolloutSource
from tests.data.contexts import check_context
from tests.rollout.contexts import NO_THOUGHTS, rollout_context

ROWS = [{"prompt": f"{number}=", "answer": str(number)} for number in range(10)]
SAMPLING = Sampling(3, temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=FirstToken(30.0, 16))
GROUP = 4
PLAIN = RolloutSource.Options(redraw=None, interruption=None)
SEED = 5


class Encoder:
    """The prompt's number, once or twice, so that prompts differ in length."""

    thoughts = NO_THOUGHTS

    def prompts(self, rows):
        return [[int(row["answer"]) + 1] * (1 + int(row["answer"]) % 2) for row in rows]


class Engine:
    """Says the seed; of a greedy answer the prompt."""

    def generate(self, requests, sampling, on_completion=None):
        if sampling.temperature == 0:
            assert sampling.first_token is None and all(len(request.seeds) == 1 for request in requests)
            return [[Completion([1], [0.0], "stop", f"greedy {request.prompt[0]}", [6])] for request in requests]
        assert sampling is SAMPLING
        return [[self.say(seed) for seed in request.seeds] for request in requests]

    def say(self, seed):
        tokens = [1 + seed % 5, 1 + seed % 7, 1 + seed % 11][: 1 + seed % 3]
        reason = "length" if len(tokens) == 3 else "stop"
        return Completion(tokens, [-0.5 * token for token in tokens], reason, str(seed), [6] * len(tokens))


def score(signal):
    """Scores of which only the groups of the prompts in `signal` differ within the group."""

    def run(texts, rows):
        raw = torch.tensor(
            [float(place % 2) if int(row["answer"]) in signal else 1.0 for place, row in enumerate(rows)]
        )
        return 2 * raw, {"right": raw, "long": torch.arange(len(texts)).float()}

    return run


def source(world, signal=range(10), prompts=4, redraw=None, columns=(), scores=None, shuffle=True):
    own = {"score": scores or score(signal), "columns": columns, "shuffle": shuffle}
    context = rollout_context(world, Engine(), Encoder(), ROWS, prompts, GROUP, SAMPLING, SEED, **own)
    return RolloutSource(replace(PLAIN, redraw=redraw), context)


def drawn(batch):
    """The groups of a batch in order, and whether each is whole."""
    groups = batch["group"].tolist()
    assert all(groups[i] == groups[i - i % GROUP] for i in range(len(groups)))
    return groups[::GROUP]


def texts(batch):
    return {unit: row["text"] for unit, row in zip(batch["unit"].tolist(), fields(batch), strict=True)}


def test_seeds_of_rows_are_all_different():
    seeds = [row_seed(s, p, n) for s in range(5) for p in range(200) for n in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(1, 2, 3) == row_seed(1, 2, 3)


def test_a_row_of_the_batch():
    completion = Completion([7, 8], [-0.25, -1.5], "length", "said", [3, 4])
    row = to_row(uncut(completion).trajectory([5, 6, 4], {"prompt": "p", "answer": "a"}), group=3, unit=13)
    assert set(row) == {*SOURCE_COLUMNS, "rollout_logprobs", "version"} and (row["group"], row["unit"]) == (3, 13)
    assert row["tokens"]["input_ids"].tolist() == [5, 6, 4, 7, 8]
    assert row["tokens"]["attention_mask"].tolist() == [1, 1, 1, 1, 1]
    assert row["response_mask"].tolist() == [False, False, False, True, True]
    assert row["rollout_logprobs"].tolist() == [0, 0, 0, -0.25, -1.5]
    assert row["truncated"] is True and row["version"].tolist() == [0, 0, 0, 3, 4]
    assert row["fields"] == {"prompt": "p", "answer": "a", "text": "said", "finish_reason": "length"}
    ended = uncut(Completion([7], [0.0], "stop", "", [0])).trajectory([5], {})
    assert to_row(ended, group=0, unit=0)["truncated"] is False


def test_a_batch_has_the_columns_that_it_promises(ranks):
    [batch] = ranks(1, lambda world: source(world).next(Metrics()))
    assert set(batch.keys()) == set(PLAIN.facts().writes)
    assert len(batch) == 4 * GROUP
    order = RowSampler(range(10), SEED).take(4)
    assert drawn(batch) == [position for position, _ in order]
    assert sorted(batch["unit"].tolist()) == list(range(16))
    for number, row in enumerate(fields(batch)):
        position, chosen = order[number // GROUP]
        assert row["prompt"] == ROWS[chosen]["prompt"]
        assert row["text"] == str(row_seed(SEED, position, number % GROUP))
        assert batch["terms", "right"][number] == number % 2
        assert batch["scores"][number] == 2 * (number % 2)
        assert bool(batch["truncated"][number]) == (row["finish_reason"] == "length")
    assert batch["terms", "long"].tolist() == list(range(16))
    sampled = batch["response_mask"]
    assert torch.equal(batch["rollout_logprobs"][sampled], -0.5 * batch["tokens", "input_ids"][sampled])
    assert batch["rollout_logprobs"][~sampled].eq(0).all()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_what_one_rank_draws(size, ranks):
    def three_steps(world):
        mine = source(world)
        return [mine.next(Metrics()) for _ in range(3)]

    [alone] = ranks(1, three_steps)
    shared = ranks(size, three_steps)
    for step in range(3):
        parts = [theirs[step] for theirs in shared]
        assert [len(part) for part in parts] == [16 // size] * size
        assert {unit: text for part in parts for unit, text in texts(part).items()} == texts(alone[step])
        assert not set.intersection(*({*drawn(part)} for part in parts))


def test_without_a_shuffle_prompts_come_in_the_order_of_the_rows(ranks):
    def steps(world):
        mine = source(world, shuffle=False)
        batches = [mine.next(Metrics()) for _ in range(3)]
        return [[row["answer"] for row in fields(batch)][::GROUP] for batch in batches]

    one, other = ranks(2, steps)
    assert one == [["0", "2"], ["4", "6"], ["8", "0"]] and other == [["1", "3"], ["5", "7"], ["9", "1"]]


def test_a_source_goes_on_where_it_was(ranks):
    def work(world):
        whole, later = source(world), source(world)
        whole.next(Metrics())
        later.load_state_dict(whole.state_dict())
        return drawn(whole.next(Metrics())), drawn(later.next(Metrics()))

    for expected, found in ranks(2, work):
        assert found == expected


def test_its_facts():
    facts = PLAIN.facts()
    assert facts.sampled == "always" and facts.scores and facts.given is None and facts.fields == ("prompt",)
    assert "turn" not in facts.writes and facts.writes_if_read == ("greedy_scores",)
    stopped = replace(PLAIN, interruption=ForcedStop([0.4, 0.6], "time")).facts()
    assert stopped == facts, "an answer is one turn, whatever is inserted into it"
    assert PLAIN.always_sampled() == PLAIN


@pytest.mark.parametrize(
    ("term", "size", "message"),
    [
        ("wrong", 4, r"^algorithm\.source\.redraw\.term=wrong: none of reward\.terms, which are right$"),
        ("right", 1, r"^algorithm\.group_size=1: a group of one never differs"),
        ("wrong", 1, r"redraw\.term=wrong: .*\nalgorithm\.group_size=1: "),
    ],
)
def test_dynamic_sampling_that_finds_nothing_is_refused_before_a_model_is_loaded(term, size, message):
    options = replace(PLAIN, redraw=DynamicSampling(term, None, 2))
    with pytest.raises(ValueError, match=message):
        options.check(check_context(group_size=size))
    PLAIN.check(check_context(group_size=size))


# Greedy baselines


def prompt_scores(texts, rows):
    """A greedy answer scores the number of its prompt, any other its place."""
    numbers = [float(text.split()[1]) if "greedy" in text else float(place) for place, text in enumerate(texts)]
    return torch.tensor(numbers), {"right": torch.zeros(len(texts))}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("redraw", [None, DynamicSampling(term="right", between=None, max_rounds=2)])
def test_every_row_has_the_score_of_its_prompts_greedy_answer(size, redraw, ranks):
    def work(world):
        mine = source(world, redraw=redraw, columns=("greedy_scores", "scores"), scores=prompt_scores)
        metrics = Metrics()
        batch = mine.next(metrics)
        return batch, metrics.reduce(world.gather)["rollout/greedy_score"]

    found = ranks(size, work)
    for batch, _ in found:
        facts = PLAIN.facts()
        assert set(batch.keys()) == {*facts.writes, *facts.writes_if_read}
        assert batch["greedy_scores"].shape == (16 // size,) and batch["greedy_scores"].dtype == torch.float32
        assert batch["greedy_scores"].tolist() == [int(row["answer"]) + 1 for row in fields(batch)]
        assert batch["rollout_logprobs"][batch["response_mask"]].lt(0).all(), "the greedy answer is not trained"
    if redraw is None:
        drawn = [row + 1 for _, row in RowSampler(range(10), SEED).take(4)]
        assert found[0][1] == sum(drawn) / 4


def test_a_greedy_answer_changes_no_other(ranks):
    def work(world):
        return source(world).next(Metrics()), source(world, columns=("greedy_scores",)).next(Metrics())

    [(plain, watched)] = ranks(1, work)
    assert texts(plain) == texts(watched)
    assert torch.equal(plain["scores"], watched["scores"])


# Dynamic sampling

REDRAW = DynamicSampling(term="right", between=None, max_rounds=5)


def informative(world, signal, steps=1, redraw=REDRAW, prompts=4):
    """Groups of every step with the metrics, and the source."""
    mine = source(world, signal, redraw=redraw, prompts=prompts)
    found = []
    for _ in range(steps):
        metrics = Metrics()
        batch = mine.next(metrics)
        found.append((batch, metrics.reduce(world.gather)))
    return mine, found


def positions_with(signal, count):
    return [position for position, row in RowSampler(range(10), SEED).take(200) if row in signal][:count]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_groups_without_signal_are_drawn_again_until_the_batch_is_full(size, ranks, caplog):
    signal = {0, 1, 2, 3}
    found = ranks(size, lambda world: informative(world, signal, steps=3))
    for step in range(3):
        batches = [theirs[1][step][0] for theirs in found]
        assert [len(batch) for batch in batches] == [16 // size] * size, "every rank has the same to train on"
        expected = positions_with(signal, 12)[4 * step : 4 * step + 4]
        assert sorted(group for batch in batches for group in drawn(batch)) == expected
        assert found[0][1][step][1]["rollout/informative"] == 1.0
    assert found[0][1][0][1]["rollout/rounds"] >= 2
    assert not caplog.records


def test_what_is_left_over_waits_in_the_order_of_its_draw(ranks):
    signal = {1, 2, 3, 4, 5, 6}
    [(mine, _)] = ranks(1, lambda world: informative(world, signal))
    surplus = [group[0]["group"] for group in mine.surplus]
    assert surplus and surplus == positions_with(signal, 99)[4 : 4 + len(surplus)]


def test_the_cap_fills_the_batch_with_a_warning(ranks, caplog):
    redraw = DynamicSampling(term="right", between=None, max_rounds=2)
    row = RowSampler(range(10), SEED).take(1)[0][1]
    with caplog.at_level(logging.WARNING):
        [(mine, [(batch, numbers)])] = ranks(1, lambda world: informative(world, {row}, redraw=redraw))
    assert drawn(batch) == [0, 1, 2, 3]
    assert numbers["rollout/informative"] == 0.25
    assert numbers["rollout/rounds"] == 2
    assert "found 1 of 4 groups" in caplog.text and "algorithm.source.redraw.max_rounds=2" in caplog.text
    assert mine.surplus == []


@pytest.mark.parametrize("signal", [set(), {0}, {0, 1}, {5}])
def test_every_rank_has_groups_even_where_it_found_none(signal, ranks, caplog):
    redraw = DynamicSampling(term="right", between=None, max_rounds=2)
    found = ranks(2, lambda world: informative(world, signal, steps=2, redraw=redraw, prompts=2))
    assert [[len(batch) for batch, _ in theirs[1]] for theirs in found] == [[GROUP, GROUP], [GROUP, GROUP]]


@pytest.mark.parametrize(("wrote", "reads"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_the_surplus_survives_on_another_number_of_ranks(wrote, reads, ranks):
    signal = {1, 2, 3, 4, 5, 6}

    def first(world):
        saved, _ = informative(world, signal)
        return saved.state_dict(), drawn(saved.next(Metrics()))

    def second(world, state):
        restored = source(world, signal, redraw=REDRAW)
        restored.load_state_dict(state)
        return drawn(restored.next(Metrics()))

    found = ranks(wrote, first)
    state, expected = found[0][0], sorted(group for _, groups in found for group in groups)
    assert state["surplus"]
    assert sorted(group for groups in ranks(reads, lambda world: second(world, state)) for group in groups) == expected


class MediaSource(RolloutSource):
    """Every group has media that its rows share, of a size of its own; every third group has none."""

    def draw(self, metrics):
        groups = super().draw(metrics)
        for group in groups:
            position = group[0]["group"]
            media = {"pixels": torch.full((1 + position % 4, 2), float(position))} if position % 3 else None
            for row in group:
                row["media"] = media
        return groups


@pytest.mark.parametrize(("wrote", "reads"), [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_the_surplus_keeps_its_media_through_a_checkpoint(wrote, reads, ranks):
    def start(world):
        context = rollout_context(
            world, Engine(), Encoder(), ROWS, 4, GROUP, SAMPLING, SEED, score=score({1, 2, 3, 4, 5, 6})
        )
        return MediaSource(replace(PLAIN, redraw=REDRAW), context)

    def first(world):
        saved = start(world)
        saved.next(Metrics())
        file = io.BytesIO()
        torch.save(saved.state_dict(), file)
        return file.getvalue(), saved.next(Metrics())

    def second(world, file):
        restored = start(world)
        restored.load_state_dict(torch.load(io.BytesIO(file), map_location="cpu", weights_only=False))
        return restored.next(Metrics())

    written = ranks(wrote, first)
    resumed = ranks(reads, lambda world: second(world, written[0][0]))
    waiting = [group[0]["group"] for group in torch.load(io.BytesIO(written[0][0]), weights_only=False)["surplus"]]
    assert any(position % 3 for position in waiting), "a group with media waits for the next step"
    groups = [
        sorted(group for batch in batches for group in drawn(batch)) for batches in (resumed, (b for _, b in written))
    ]
    assert groups[0] == groups[1] and set(waiting) <= set(groups[0])
    for batch in resumed:
        entries = media_entries(batch) or [{}] * len(batch)
        for place, (group, entry) in enumerate(zip(batch["group"].tolist(), entries, strict=True)):
            assert set(entry.keys()) == ({"pixels"} if group % 3 else set())
            if group % 3:
                assert torch.equal(entry["pixels"], torch.full((1 + group % 4, 2), float(group)))
                assert entry is entries[place - place % GROUP], "its rows still share it"


@pytest.mark.parametrize(
    ("raw", "between", "kept"),
    [
        ([0, 1, 1, 1, 1], [0.2, 0.8], True),  # the bounds are inside
        ([1, 0, 0, 0, 0], [0.2, 0.8], True),
        ([0, 1, 1, 1, 1, 1], [0.2, 0.8], False),
        ([1, 0, 0, 0, 0, 0], [0.2, 0.8], False),
        ([0, 1, 1, 1, 1, 1], None, True),
        ([0.5, 0.5], [0.2, 0.8], False),
        ([0.4, 0.6], [0.2, 0.8], True),
        ([-3, -1], [0.0, 1.0], False),
        ([2, 4], [0.0, 3.0], True),
        ([math.nan, 0, 1], None, True),  # a row without a score does not count
        ([math.nan, 1, 1], None, False),
        ([math.nan, 0, 1], [0.4, 0.6], True),
        ([math.nan, math.nan], None, False),
    ],
)
def test_groups_are_kept_by_their_mean(raw, between, kept):
    group = [{"unit": n, "terms": {"right": torch.tensor(value)}} for n, value in enumerate(raw)]
    assert keeps(DynamicSampling("right", between, 1), group) is kept


@pytest.mark.parametrize("size", [1, 2])
def test_groups_outside_the_middle_are_drawn_again(size, ranks):
    """Of prompts below 5 two answers of four are right, of the others one; only those are between."""

    def uneven(texts, rows):
        right = [float(place % (2 if int(row["answer"]) < 5 else 4) == 0) for place, row in enumerate(rows)]
        return torch.tensor(right), {"right": torch.tensor(right)}

    def work(world):
        mine = source(world, redraw=DynamicSampling("right", [0.3, 0.8], 5), scores=uneven)
        return mine.next(Metrics())

    assert sorted(group for batch in ranks(size, work) for group in drawn(batch)) == positions_with(range(5), 4)


@pytest.mark.parametrize("between", [[0.2], [0.2, 0.5, 0.8], [0.5, 0.5], [0.8, 0.2], [-0.1, 0.5], []])
def test_bounds_that_bound_nothing_are_refused(between):
    node = {"term": "right", "between": between, "max_rounds": 1}
    with pytest.raises(ValueError, match=r"^algorithm\.source\.redraw\.between(=.*)?: expected \[(low|number), "):
        convert(node, DynamicSampling, "algorithm.source.redraw")
