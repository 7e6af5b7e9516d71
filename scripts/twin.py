"""Runs the governor of asynchronous rollout under a virtual clock, with servers, rewards and a trainer as models.

    python scripts/twin.py --configurations 1000 --seed 0

Every configuration draws its own staleness, batch, ranks, concurrency, lengths of answers, durations, faults and kills.
The governor is the one of the trainer (`rft.rollout.schedule.governor`). Checked in each: no token that trains is
older than the staleness; the trainer never waits for a group that is not sampled; every ordinal is trained once, or
dropped for want of signal; the ordinals that a step trains are those of a synchronous run, whatever the durations; and
each rank starts its lowest ordinal first, no more than it may, and as many of a step as the others, up to one.
"""

import argparse
import heapq
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

from rft.rollout.schedule.governor import Governor

Make = Callable[..., Governor]


@dataclass(frozen=True)
class Setting:
    """A configuration.

    Attributes:
        staleness, batch, in_flight, ranks, steps: of the run; `in_flight` over all ranks.
        slots: groups that the servers sample at once.
        spread: of the logarithm of the seconds that a group takes; its mean is 0.
        update_s, publish_s, reward_s: mean seconds of an update, of new weights and of a score.
        crash: the chance that the sampling of a group fails and begins again.
        signal: the share of groups with signal, where groups without are drawn again; None: all train.
        rounds: of `max_rounds`.
        kills: the steps in which the run is killed and continues from the checkpoint of the step before.
        after: the staleness behind the first kill.
        keeps: whether the checkpoint has the groups that are done.
        seed: of all draws.
    """

    staleness: int
    batch: int
    in_flight: int
    ranks: int
    steps: int
    slots: int
    spread: float
    update_s: float
    publish_s: float
    reward_s: float
    crash: float
    signal: float | None
    rounds: int
    kills: frozenset[int]
    after: int
    keeps: bool
    seed: int

    def draw(self, ordinal: int, what: str, attempt: int = 0) -> random.Random:
        """The random numbers of an ordinal: the same whenever it is sampled."""
        return random.Random(f"{self.seed} {ordinal} {what} {attempt}")

    def seconds(self, ordinal: int) -> float:
        """That the answers take."""
        return self.draw(ordinal, "length").lognormvariate(0.0, self.spread)

    def informative(self, ordinal: int) -> bool:
        """Whether its group has signal."""
        return self.signal is None or self.draw(ordinal, "signal").random() < self.signal


@dataclass
class Outcome:
    """What a simulated run did.

    Attributes:
        trained: the ordinals of each step.
        dropped: those without signal.
        ages: of the oldest token of each group that trained.
        seconds: of the run.
        idle_s: in which the trainer waited for groups.
        events: that were simulated.
        again: groups that were sampled again after a kill.
    """

    trained: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    seconds: float = 0.0
    idle_s: float = 0.0
    events: int = 0
    again: int = 0


class Fault(AssertionError):
    """A property does not hold."""


class Twin:
    """Simulates one run.

    Args:
        setting: of the run.
        make: makes a governor.
    """

    def __init__(self, setting: Setting, make: Make = Governor) -> None:
        self.setting, self.make, self.outcome = setting, make, Outcome()
        self.now = 0.0
        self.version, self.staleness = 0, setting.staleness
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.begin()

    def begin(self) -> None:
        """A process of the run begins; nothing is sampled."""
        setting = self.setting
        share = max(1, setting.in_flight // setting.ranks)
        last = None if setting.signal is not None else setting.batch * setting.steps
        self.governors = [
            self.make(self.staleness, setting.batch, share, last=last, rank=rank, ranks=setting.ranks)
            for rank in range(setting.ranks)
        ]
        self.events.clear()
        self.busy = 0
        self.oldest: dict[int, int] = {}  # the version of the first token of a group
        self.done: set[int] = set()

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        """Plans an event."""
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), what))

    def fill(self) -> None:
        """The ranks start what their governors and the servers allow, in turn."""
        started = True
        while started:
            started = False
            for governor in self.governors:
                if self.busy < self.setting.slots and (ordinal := governor.may_start()) is not None:
                    if ordinal != min(governor.waiting):
                        raise Fault(f"ordinal {ordinal} starts before {min(governor.waiting)}")
                    governor.start(ordinal)
                    if len(governor.running) > max(1, self.setting.in_flight // self.setting.ranks):
                        raise Fault(f"a rank samples {len(governor.running)} groups at a time")
                    self.sample(governor, ordinal, 0)
                    started = True

    def sample(self, governor: Governor, ordinal: int, attempt: int) -> None:
        """A server samples a group; where it fails, the group begins again there."""
        setting, drawn = self.setting, self.setting.draw(ordinal, "crash", attempt)
        self.busy += 1
        self.oldest[ordinal] = self.version
        fails = attempt < 5 and drawn.random() < setting.crash
        length = setting.seconds(ordinal)

        def fail() -> None:
            self.busy -= 1
            self.sample(governor, ordinal, attempt + 1)

        def answer() -> None:
            self.busy -= 1
            self.at(setting.reward_s * drawn.expovariate(1.0), score)

        def score() -> None:
            governor.end(ordinal)
            self.done.add(ordinal)

        self.at(length * drawn.random(), fail) if fails else self.at(length, answer)

    def pass_time(self, until: Callable[[], bool]) -> None:
        """Simulates events until something holds."""
        self.fill()
        while not until():
            if not self.events:
                raise Fault("the trainer waits, and nothing is sampled")
            self.now, _, what = heapq.heappop(self.events)
            self.outcome.events += 1
            what()
            self.fill()

    def spend(self, seconds: float) -> None:
        """The trainer works."""
        ended: list[bool] = []
        self.at(seconds, lambda: ended.append(True))
        self.pass_time(lambda: bool(ended))

    def draw(self) -> None:
        """Every rank draws what its governor asks for."""
        counts = {governor.to_draw() for governor in self.governors}
        if len(counts) != 1:
            raise Fault(f"ranks draw different numbers of prompts: {counts}")
        for governor in self.governors:
            governor.draw(*counts)

    def wait_for(self, ordinals: list[int]) -> None:
        """The trainer waits for groups."""
        since = self.now
        self.pass_time(lambda: self.done.issuperset(ordinals))
        self.outcome.idle_s += self.now - since

    def choose(self) -> list[int]:
        """The ordinals that the next step trains, as `GroupStream` chooses them."""
        setting, first = self.setting, self.governors[0]
        kept, left = 0, 0 if setting.signal is None else setting.rounds * setting.batch
        while kept < setting.batch and left:
            looked_at = first.next(kept, min(setting.batch - kept, left))
            if not looked_at:
                raise Fault("too few prompts are drawn")
            left -= len(looked_at)
            self.wait_for(looked_at)
            dropped = [ordinal for ordinal in looked_at if not setting.informative(ordinal)]
            kept += len(looked_at) - len(dropped)
            for governor in self.governors:
                governor.drop(dropped)
            self.outcome.dropped += dropped
            self.draw()
        self.wait_for(first.next(0, setting.batch))
        chosen = [governor.train() for governor in self.governors]
        if any(one != chosen[0] for one in chosen):
            raise Fault(f"ranks train different ordinals: {chosen}")
        return chosen[0]

    def step(self) -> None:
        """One step: groups, update, new weights."""
        setting, number = self.setting, self.governors[0].step
        for governor in self.governors:
            governor.publish(self.version)
        self.draw()
        chosen = self.choose()
        for ordinal in chosen:
            age = number - self.oldest[ordinal]
            if not 0 <= age <= self.staleness:
                raise Fault(f"step {number} trains ordinal {ordinal}, {age} versions old")
            self.outcome.ages.append(age)
        shares = [sum(map(governor.owns, chosen)) for governor in self.governors]
        if setting.signal is None and (max(shares) - min(shares) > 1 or sum(shares) != setting.batch):
            raise Fault(f"the ranks sample {shares} groups of a step")
        self.outcome.trained.append(chosen)
        drawn = setting.draw(number, "step")
        self.spend(setting.update_s * drawn.uniform(0.5, 1.5))
        self.spend(setting.publish_s * drawn.uniform(0.5, 1.5))
        self.version += 1

    def kill(self) -> None:
        """The run is killed; a new process continues from the last step, as `GroupStream.load_state_dict` does."""
        before, done, oldest = self.governors, self.done, self.oldest
        self.staleness = self.setting.after
        self.begin()
        for old, new in zip(before, self.governors, strict=True):
            new.step, new.drawn, new.outstanding = old.step, old.drawn, list(old.outstanding)
            new.publish(old.step)
            for place, ordinal in enumerate(new.outstanding):
                if not new.owns(ordinal):
                    continue
                if self.setting.keeps and ordinal in done and oldest[ordinal] >= new.oldest(place):
                    self.done.add(ordinal)
                    self.oldest[ordinal] = oldest[ordinal]
                else:
                    self.outcome.again += ordinal in done or ordinal in oldest
                    new.again(ordinal)

    def run(self) -> Outcome:
        """Simulates all steps and checks what was trained.

        Raises:
            Fault: a property does not hold.
        """
        for number in range(self.setting.steps):
            if number in self.setting.kills:
                self.kill()
            self.step()
        self.outcome.seconds = self.now
        if self.setting.signal is None and any(governor.outstanding for governor in self.governors):
            raise Fault("prompts are drawn that no step trains")
        expected, dropped = synchronous(self.setting)
        if (self.outcome.trained, self.outcome.dropped) != (expected, dropped):
            raise Fault("the steps train other ordinals than those of a synchronous run")
        return self.outcome


def synchronous(setting: Setting) -> tuple[list[list[int]], list[int]]:
    """The ordinals of each step, and those that are dropped, of a run that samples one group after the other."""
    ordinals, trained, dropped = itertools.count(), list[list[int]](), list[int]()
    for _ in range(setting.steps):
        step, left = list[int](), 0 if setting.signal is None else setting.rounds * setting.batch
        while len(step) < setting.batch:
            ordinal, looked_at = next(ordinals), left > 0
            left -= looked_at
            (dropped if looked_at and not setting.informative(ordinal) else step).append(ordinal)
        trained.append(step)
    return trained, dropped


def settings(count: int, seed: int) -> Iterator[Setting]:
    """Random configurations."""
    for number in range(count):
        drawn = random.Random(f"{seed} {number}")
        batch, staleness = drawn.choice((1, 2, 4, 8, 16)), drawn.choice((0, 1, 1, 2, 4))
        steps = drawn.randint(10, 90)
        redrawn = drawn.random() < 0.3
        yield Setting(
            staleness=staleness,
            batch=batch,
            in_flight=drawn.choice((1, batch, (staleness + 1) * batch)),
            ranks=drawn.choice((1, 1, 2, 3)),
            steps=steps,
            slots=drawn.randint(1, 2 * batch),
            spread=drawn.uniform(0.0, 1.5),
            update_s=drawn.uniform(0.0, 1.5 * batch),
            publish_s=drawn.uniform(0.0, 0.5),
            reward_s=drawn.choice((0.0, 0.1, 3.0)),
            crash=drawn.choice((0.0, 0.0, 0.05, 0.3)),
            signal=drawn.uniform(0.2, 1.0) if redrawn else None,
            rounds=drawn.randint(1, 6),
            kills=frozenset(drawn.sample(range(1, steps), drawn.choice((0, 0, 1, 3)))),
            after=drawn.choice((staleness, 0, 1, 3)),
            keeps=drawn.random() < 0.7,
            seed=drawn.randrange(2**32),
        )


def check(count: int, seed: int, make: Make = Governor, compares: bool = False) -> dict[str, Any]:
    """Simulates random configurations.

    Args:
        compares: simulates each also as a synchronous run, for its seconds.

    Returns:
        Totals over all of them.

    Raises:
        Fault: a property does not hold in one of them; names the configuration.
    """
    events = groups = again = 0
    idle, speed = dict[str, list[float]](synchronous=[], ahead=[]), list[float]()
    for setting in settings(count, seed):
        try:
            outcome = Twin(setting, make).run()
        except (Fault, AssertionError, IndexError, ValueError) as error:
            raise Fault(f"{setting}: {error!r}") from error
        events += outcome.events
        groups += len(outcome.ages)
        again += outcome.again
        if setting.staleness and compares:
            waits = replace(setting, staleness=0, in_flight=setting.batch, kills=frozenset())
            other, same = Twin(waits, make).run(), Twin(replace(setting, kills=frozenset()), make).run()
            speed.append(other.seconds / same.seconds)
            idle["synchronous"].append(other.idle_s / other.seconds)
            idle["ahead"].append(same.idle_s / same.seconds)
    return {
        "configurations": count,
        "events": events,
        "groups trained": groups,
        "sampled again after a kill": again,
        "trainer idle, synchronous": statistics.median(idle["synchronous"] or [nan]),
        "trainer idle, ahead": statistics.median(idle["ahead"] or [nan]),
        "speed against the synchronous run": statistics.median(speed or [nan]),
    }


def main() -> None:
    """Prints the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, value in check(options.configurations, options.seed, compares=True).items():
        sys.stdout.write(f"{name:36} {value:,.2f}\n" if isinstance(value, float) else f"{name:36} {value:,}\n")


if __name__ == "__main__":
    main()
