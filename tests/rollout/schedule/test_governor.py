"""The rule of asynchronous rollout: numbers by hand, and simulated runs, which notice every mutation of the rule."""

import inspect

import pytest

from rft.rollout.schedule import governor as module
from rft.rollout.schedule.governor import Governor
from scripts.twin import Fault, check


def test_one_step_off_by_hand():
    """Two prompts a step, S = 1, at most three at a time."""
    governor = Governor(staleness=1, batch=2, in_flight=3)
    assert governor.to_draw() == 4 and list(governor.draw(4)) == [0, 1, 2, 3]
    for ordinal in (0, 1, 2):
        assert governor.may_start() == ordinal
        governor.start(ordinal)
    assert governor.may_start() is None, "three at a time"
    governor.end(1)
    assert governor.may_start() == 3
    governor.start(3)
    governor.end(0)
    assert governor.next(0, 2) == [0, 1] and governor.train() == [0, 1]
    # Version 0 is still the newest: what starts now would train in step 2.
    assert governor.to_draw() == 0 and governor.outstanding == [2, 3] and governor.oldest() == 0
    governor.publish(1)
    assert governor.to_draw() == 2
    assert (governor.oldest(0), governor.oldest(2)) == (0, 1)


def test_a_synchronous_run_samples_one_step_at_a_time():
    governor = Governor(staleness=0, batch=2, in_flight=8)
    for step in range(3):
        governor.publish(step)
        assert list(governor.draw(governor.to_draw())) == [2 * step, 2 * step + 1]
        for ordinal in list(governor.waiting):
            governor.start(ordinal)
            governor.end(ordinal)
        assert governor.train() == [2 * step, 2 * step + 1]
        assert governor.to_draw() == 0


def test_a_dropped_ordinal_makes_room_for_another():
    governor = Governor(staleness=0, batch=2, in_flight=8)
    governor.draw(governor.to_draw())
    governor.drop([0])
    assert governor.to_draw() == 1 and list(governor.draw(1)) == [2]
    assert governor.train() == [1, 2]


def test_the_last_step_draws_no_more_than_it_trains():
    governor = Governor(staleness=4, batch=2, in_flight=8, last=6)
    assert list(governor.draw(governor.to_draw())) == [0, 1, 2, 3, 4, 5]
    governor.train()
    governor.publish(1)
    assert governor.to_draw() == 0


def test_prompts_are_dealt_out_to_the_ranks():
    ranks = [Governor(staleness=0, batch=5, in_flight=8, rank=rank, ranks=2) for rank in range(2)]
    for governor in ranks:
        governor.draw(5)
    assert ranks[0].waiting == [0, 2, 4] and ranks[1].waiting == [1, 3]


def test_an_ordinal_that_is_sampled_again_has_its_place():
    governor = Governor(staleness=1, batch=2, in_flight=8)
    governor.draw(4)
    for ordinal in range(3):
        governor.start(ordinal)
    governor.again(1)
    assert governor.may_start() == 1 and governor.running == {0, 2}


def test_what_was_drawn_with_a_larger_staleness_waits_for_its_turn():
    governor = Governor(staleness=1, batch=2, in_flight=8, drawn=6, outstanding=[*range(6)], waiting=[4, 5])
    assert governor.may_start() is None, "places 4 and 5 of four that may start"
    governor.train()
    governor.publish(1)
    assert governor.may_start() == 4


def test_simulated_runs_keep_every_promise():
    totals = check(30, seed=1, compares=True)
    assert totals["events"] > 10_000 and totals["sampled again after a kill"] > 20
    assert totals["speed against the synchronous run"] > 1.1


MUTATIONS = (
    ("self.version + self.staleness + 1 - self.step", "self.version + self.staleness + 2 - self.step"),
    ("self.version + self.staleness + 1 - self.step", "self.version + self.staleness + 1"),
    ("self.version + self.staleness + 1 - self.step", "self.version + self.staleness - self.step"),
    ("min(self.allowed - len(self.outstanding), left)", "min(self.allowed - len(self.waiting), left)"),
    ("self.last - self.drawn", "self.last"),
    ("self.drawn += count", "self.drawn += count + 1"),
    ("len(self.running) >= self.in_flight", "len(self.running) > self.in_flight"),
    ("first = self.waiting[0]", "first = self.waiting[-1]"),
    ("bisect_left(self.outstanding, first) < self.allowed", "True"),
    ("ordinal % self.ranks == self.rank", "ordinal % self.ranks == 0"),
    ("self.step + place // self.batch - self.staleness", "self.step - self.staleness"),
    ("self.running.remove(ordinal)", "pass"),
    ("insort(self.waiting, ordinal)", "pass"),
    ("self.outstanding[bisect_left(self.outstanding, ordinal)]", "self.outstanding[-1]"),
    ("self.step += 1", "pass"),
)


@pytest.mark.parametrize(("line", "other"), MUTATIONS)
def test_simulated_runs_notice_a_mutation_of_the_rule(line, other):
    source = inspect.getsource(module)
    assert source.count(line) == 1
    space = {"__name__": module.__name__}
    exec(source.replace(line, other), space)
    with pytest.raises(Fault):
        check(100, seed=2, make=space["Governor"])
