"""Groups that are sampled ahead of their steps: which train when, what a checkpoint keeps, and what ends a run."""

import threading
from dataclasses import replace

import pytest
import torch

from rft.data.sampler import RowSampler
from rft.metrics import Metrics
from rft.rollout.engine.base import Begun, Completion, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.source.base import Ahead
from rft.rollout.source.rollout import DynamicSampling, RolloutSource
from tests.conftest import SOON_S
from tests.rollout.contexts import NO_THOUGHTS, plain_scoring, rollout_context

ROWS = [{"prompt": f"{number}=", "answer": str(number)} for number in range(10)]
SAMPLING = Sampling(3, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)
PLAIN = RolloutSource.Options(redraw=None, interruption=None)
GROUP, PROMPTS, SEED = 2, 4, 5


class Encoder:
    """The prompt's number."""

    thoughts = NO_THOUGHTS

    def prompts(self, rows):
        return [[int(row["answer"]) + 1] for row in rows]


class Engine:
    """Says the seed, with the weights of its version.

    Attributes:
        held: orders that are not answered until they are taken out; `changed` tells of it.
        began: the orders of the requests so far.
        aborted: a sampling that is held raises.
        known: of which orders it says that their samples have begun.
        continued: those that it is to continue.
        over: those that have ended.
    """

    def __init__(self, held=()):
        self.version, self.held, self.began, self.aborted = 0, set(held), [], False
        self.known, self.continued, self.over = [], [], []
        self.changed = threading.Condition()

    def generate(self, requests, sampling, on_completion=None):
        [request] = requests
        with self.changed:
            self.began.append(request.order)
            self.changed.notify_all()
            version = self.version
            while request.order in self.held:
                if self.aborted or not self.changed.wait(SOON_S):
                    raise OSError("given up")
        said = [Completion([1 + seed % 5], [-0.5], "stop", str(seed), [version]) for seed in request.seeds]
        return [said]

    def abort(self):
        with self.changed:
            self.aborted = True
            self.changed.notify_all()

    def begun(self):
        return [Begun(order, str(order), [1], [-0.5], [0], None) for order in self.known]

    def continue_from(self, begun):
        self.continued += [one.order for one in begun]

    def ended(self, order):
        self.over.append(order)

    def release(self, *orders):
        with self.changed:
            self.held -= {*orders}
            self.changed.notify_all()

    def wait_until(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.began) >= count, 60)


def scores(signal):
    """Scores of which only the groups of the prompts in `signal` differ within the group."""

    def run(texts, rows):
        raw = torch.tensor([float(n % 2) if int(row["answer"]) in signal else 1.0 for n, row in enumerate(rows)])
        return raw, {"right": raw}

    return run


def source(world, engine, staleness=1, in_flight=None, steps=10, redraw=None, signal=range(10)):
    own = {"score": scores(signal), "columns": (), "shuffle": True, "ahead": Ahead(staleness, in_flight, steps)}
    context = rollout_context(world, engine, Encoder(), ROWS, PROMPTS, GROUP, SAMPLING, SEED, **own)
    return RolloutSource(replace(PLAIN, redraw=redraw), context)


def take(source, engine, steps):
    """The batches of these steps, and the numbers of each; every step publishes the next version."""
    found = []
    for _ in range(steps):
        metrics = Metrics()
        found.append((source.next(metrics), metrics.reduce(lambda one: [one])))
        engine.version += 1
    return found


def drawn(batch):
    groups = batch["group"].tolist()
    assert groups[::GROUP] == groups[1::GROUP]
    return groups[::GROUP]


def alone(ranks, run):
    [found] = ranks(1, run)
    return found


def test_the_steps_train_the_prompts_and_samples_of_a_synchronous_run(ranks):
    def run(world):
        engine = Engine()
        made = source(world, engine, staleness=2, steps=6)
        batches = take(made, engine, 6)
        made.close()
        return batches, engine.began, engine.over

    batches, began, over = alone(ranks, run)
    assert [drawn(batch) for batch, _ in batches] == [[*range(4 * step, 4 * step + 4)] for step in range(6)]
    order = dict(RowSampler(range(10), SEED).take(24))
    for batch, _ in batches:
        for unit, position, text in zip(batch["unit"].tolist(), batch["group"].tolist(), batch["fields"], strict=True):
            assert text["text"] == str(row_seed(SEED, position, unit % GROUP))
            assert text["answer"] == ROWS[order[position]]["answer"]
    assert sorted(began) == sorted(over) == [*range(24)], "the last steps draw no more than they train"


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_token_is_at_most_as_old_as_the_staleness(ranks, staleness):
    """Answers come at once, so each group has the oldest weights that it may have."""

    def run(world):
        engine = Engine()
        made = source(world, engine, staleness, steps=8)
        found = []
        for step in range(8):
            metrics = Metrics()
            found.append((made.next(metrics), metrics.reduce(lambda one: [one])))
            engine.wait_until(min(32, 4 * (staleness + 1 + step)))  # all that may start have started
            engine.version += 1
        return found

    batches = alone(ranks, run)
    for step, (batch, numbers) in enumerate(batches):
        age = min(step, staleness)
        assert set(batch["version"][batch["response_mask"]].tolist()) == {step - age}
        assert numbers["staleness/max"] == age and numbers[f"staleness/age_{age}"] == 1
        of_age = [batch["ages"][..., number][batch["response_mask"]].all() for number in range(staleness + 1)]
        assert of_age == [number == age for number in range(staleness + 1)]


def test_at_most_so_many_groups_are_sampled_at_a_time_lowest_first(ranks):
    def run(world):
        engine = Engine(held=range(8))
        made = source(world, engine, staleness=1, in_flight=3, steps=2)
        threading.Thread(target=take, args=(made, engine, 2), daemon=True).start()
        engine.wait_until(3)
        first = list(engine.began)
        engine.release(1)
        engine.wait_until(4)
        second = engine.began[3:]
        engine.release(*range(8))
        engine.wait_until(8)
        return first, second

    first, second = alone(ranks, run)
    assert sorted(first) == [0, 1, 2] and second == [3]


def test_a_step_waits_for_its_own_groups_alone(ranks):
    def run(world):
        engine = Engine(held=[5])
        made = source(world, engine, staleness=1, steps=2)
        [(batch, _)] = take(made, engine, 1)
        engine.wait_until(8)
        with made.ahead._changed:
            assert made.ahead._changed.wait_for(lambda: len(made.ahead._done) == 3, 60)
        waiting = made.waiting()
        engine.release(5)
        return drawn(batch), waiting, drawn(take(made, engine, 1)[0][0])

    assert alone(ranks, run) == ([0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7])


def test_an_error_of_a_group_ends_the_run(ranks):
    def run(world):
        engine = Engine()
        made = source(world, engine)

        def fails(texts, rows):
            raise ValueError("the reward fails")

        made.context = replace(made.context, scoring=plain_scoring(fails))
        with pytest.raises(ValueError, match="the reward fails"):
            made.next(Metrics())

    alone(ranks, run)


def test_the_end_of_a_stage_gives_up_what_is_sampled(ranks):
    def run(world):
        engine = Engine(held=range(4, 8))
        made = source(world, engine, staleness=1, steps=9)
        take(made, engine, 1)
        engine.wait_until(8)
        made.close()
        made.ahead._threads.shutdown()  # returns once all threads have ended
        return engine.aborted

    assert alone(ranks, run)


REDRAW = DynamicSampling(term="right", between=None, max_rounds=3)


def test_groups_without_signal_are_dropped_and_the_next_ones_take_their_places(ranks):
    signal = (1, 4, 7, 8)

    def run(world):
        engine = Engine()
        made = source(world, engine, staleness=1, redraw=replace(REDRAW, max_rounds=9), signal=signal)
        found = []
        for _ in range(4):
            found += [(drawn(batch), numbers, made.dropped()) for batch, numbers in take(made, engine, 1)]
        return found, made.waiting()

    steps, waiting = alone(ranks, run)
    order = RowSampler(range(10), SEED).take(60)
    informative = [position for position, row in order if row in signal]
    trained = [position for groups, _, _ in steps for position in groups]
    assert trained == informative[:16]
    dropped = sorted(position for _, _, reasons in steps for position in reasons.get("no signal", []))
    assert dropped == sorted({*range(trained[-1])} - {*trained})
    assert waiting == [*range(trained[-1] + 1, trained[-1] + 1 + len(waiting))], "every prompt is in one place"
    assert all(0 <= numbers["staleness/max"] <= 1 for _, numbers, _ in steps)
    assert all(numbers["rollout/informative"] == 1 for _, numbers, _ in steps)


def test_behind_the_rounds_the_next_groups_fill_the_step(ranks, caplog):
    def run(world):
        engine = Engine()
        made = source(world, engine, staleness=1, redraw=REDRAW, signal=())
        [(batch, numbers)] = take(made, engine, 1)
        return drawn(batch), numbers, made.dropped()

    groups, numbers, dropped = alone(ranks, run)
    assert groups == [12, 13, 14, 15] and dropped == {"no signal": [*range(12)]}
    assert numbers["rollout/rounds"] == 3 and numbers["rollout/informative"] == 0
    assert "0 of 4 groups with signal" in caplog.text


def test_a_checkpoint_has_what_is_done_and_the_rest_is_sampled_again(ranks):
    def run(world):
        engine = Engine(held=[5])
        made = source(world, engine, staleness=1, steps=3)
        take(made, engine, 1)
        with made.ahead._changed:
            assert made.ahead._changed.wait_for(lambda: len(made.ahead._done) == 3, 60)
        engine.known = [5, 6]  # 6 is done
        state = made.state_dict()
        engine.abort()
        other = Engine()
        other.version = 1
        again = source(world, other, staleness=1, steps=3)
        again.load_state_dict(state)
        waiting = again.waiting()
        return waiting, take(again, other, 2), other.began, other.continued

    waiting, batches, began, continued = alone(ranks, run)
    assert continued == [5], "what had begun of the others is a group by now"
    assert waiting == [4, 5, 6, 7]
    assert [drawn(batch) for batch, _ in batches] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert sorted(began) == [5, 8, 9, 10, 11], "no group that was done is sampled again"
    versions = batches[0][0]["version"].sum(-1).tolist()
    assert versions == [0, 0, 1, 1, 0, 0, 0, 0]


def test_a_smaller_staleness_samples_again_what_is_too_old(ranks, caplog):
    def run(world):
        engine = Engine()
        made = source(world, engine, staleness=2, steps=5)
        take(made, engine, 1)
        with made.ahead._changed:
            assert made.ahead._changed.wait_for(lambda: len(made.ahead._done) == 8, 60)
        state = made.state_dict()
        other = Engine()
        other.version = 1
        again = source(world, other, staleness=1, steps=5)
        again.load_state_dict(state)
        return take(again, other, 2), other.began

    batches, began = alone(ranks, run)
    assert [drawn(batch) for batch, _ in batches] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert {8, 9, 10, 11} <= set(began) and not {4, 5, 6, 7} & set(began)
    assert all(numbers["staleness/max"] <= 1 for _, numbers in batches)
    assert "4 groups of the checkpoint are older than rollout.staleness=1 allows" in caplog.text


def test_a_smaller_staleness_continues_no_answer_that_is_too_old(ranks):
    def run(world):
        engine = Engine(held=range(4, 12))
        made = source(world, engine, staleness=2, steps=5)
        take(made, engine, 1)
        engine.wait_until(12)
        engine.known = [5, 9]
        state = made.state_dict()
        engine.abort()
        other = Engine()
        again = source(world, other, staleness=1, steps=5)
        again.load_state_dict(state)
        return other.continued

    assert alone(ranks, run) == [5], "the tokens of 9 would be two versions old"
