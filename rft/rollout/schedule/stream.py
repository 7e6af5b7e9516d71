"""Asynchronous rollout: threads sample and score groups while the trainer trains on earlier ones.

The governor decides which prompts are sampled when. A thread takes one prompt at a time and answers it with the
source's own `answer_row`, so groups, forced stops, greedy answers and rewards are those of a synchronous run. Only the
main thread, inside `next`, draws rows, calls collectives and decides what trains.
"""

import itertools
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from rft.batch.media import keep_once, share_again
from rft.imports import import_part
from rft.metrics import Metrics
from rft.rollout.engine.base import Begun
from rft.rollout.schedule.governor import Governor
from rft.rollout.source.rollout import NO_SIGNAL, REDRAW, Group, RolloutSource
from rft.waits import waiting


@dataclass(frozen=True)
class Drawn:
    """A row that was drawn.

    Attributes:
        position: of the draw; it decides the seeds.
        row: its number in the data set.
    """

    position: int
    row: int


@dataclass(frozen=True)
class Answered:
    """A group that is sampled and scored.

    Attributes:
        group: its rows.
        metrics: what its sampling and scoring has measured.
    """

    group: Group
    metrics: Metrics


class GroupStream:
    """Samples groups ahead of the steps that train on them.

    Args:
        source: answers rows; its row sampler draws them.

    Attributes:
        governor: decides what starts and what trains.
    """

    def __init__(self, source: RolloutSource) -> None:
        self._source, self._context, ahead = source, source.context, source.context.ahead
        assert ahead is not None, "a synchronous run"
        world, batch, redraw = self._context.world, self._context.prompts, source.options.redraw
        in_flight = ahead.in_flight or (ahead.staleness + 1) * batch
        self.governor = Governor(
            staleness=ahead.staleness,
            batch=batch,
            in_flight=len(range(in_flight)[self._context.share]) or 1,
            last=None if redraw else ahead.steps * batch,
            rank=world.rank,
            ranks=world.size,
        )
        self._first: int | None = None  # the version of the weights in the first step of the stage
        self._drawn: dict[int, Drawn] = {}  # the outstanding ordinals of all ranks
        self._rows: dict[int, dict[str, Any]] = {}  # of the ordinals of this rank that wait or run
        self._done: dict[int, Answered] = {}  # of this rank
        self._problem: BaseException | None = None
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(self.governor.in_flight, "group")
        self._closed = False
        self._idle_since: float | None = None
        self._idle_s = 0.0  # in which this rank sampled nothing, since the last step
        self._keeps = None if redraw is None else import_part(REDRAW[0], "keeps", "algorithm.source.redraw")

    def next(self, metrics: Metrics) -> list[Group]:
        """This rank's groups of the next step. A collective where groups without signal are redrawn.

        Raises:
            Exception: what the sampling or scoring of a group has raised.
        """
        if self._first is None:
            self._first = self._context.sampler.version - self.governor.step
        step = self.governor.step
        with self._changed:
            self.governor.publish(self._context.sampler.version - self._first)
        with metrics.timer("rollout"):
            self._draw()
            if self._keeps is not None:
                self._drop_uninformative(metrics)
            chosen = self._wait_for(self.governor.next(0, self.governor.batch))
            with self._changed:
                self._forget(self.governor.train())
        groups = [answered.group for answered in chosen]
        for answered in chosen:
            metrics.include(answered.metrics)
        self._measure(groups, step, metrics)
        if self._keeps is not None:  # groups move between ranks, because which rank finds signal is random
            groups = self._source.all_groups(groups)[self._context.share]
        return groups

    def _drop_uninformative(self, metrics: Metrics) -> None:
        """Drops groups without signal, until the step has enough with signal or `max_rounds` steps of prompts are
        looked at: then the next groups fill the step, whatever they are. A collective."""
        source, governor, keeps, batch = self._source, self.governor, self._keeps, self.governor.batch
        redraw, world = source.options.redraw, self._context.world
        assert redraw is not None and keeps is not None
        kept, most = 0, redraw.max_rounds * batch
        left = most
        while kept < batch and left:
            looked_at = governor.next(kept, min(batch - kept, left))
            assert looked_at, "too few prompts are drawn"
            left -= len(looked_at)
            found, dropped = self._wait_for(looked_at), list[int]()
            for ordinal, answered in zip(filter(governor.owns, looked_at), found, strict=True):
                if not keeps(redraw, answered.group):
                    source.drop([answered.group], NO_SIGNAL)
                    metrics.include(answered.metrics)
                    dropped.append(ordinal)
            dropped = [ordinal for part in world.gather(dropped) for ordinal in part]
            kept += len(looked_at) - len(dropped)
            with self._changed:
                governor.drop(dropped)
                self._forget(dropped)
            self._draw()
        metrics.largest("rollout/rounds", -(-(most - left) // batch))
        report = import_part(REDRAW[0], "report_signal", "algorithm.source.redraw")
        report(redraw, kept, batch, "the groups behind them", metrics)

    def _forget(self, ordinals: list[int]) -> None:
        for ordinal in ordinals:
            del self._drawn[ordinal]
            self._done.pop(ordinal, None)

    def _draw(self) -> None:
        """Draws as many rows as the governor allows, the same on every rank."""
        count = self.governor.to_draw()
        drawn = [Drawn(*pair) for pair in self._source.row_sampler.take(count)]
        with self._changed:
            for ordinal, one in zip(self.governor.draw(count), drawn, strict=True):
                self._add(ordinal, one)
            self._start()

    def _add(self, ordinal: int, drawn: Drawn) -> None:
        self._drawn[ordinal] = drawn
        if self.governor.owns(ordinal):
            self._rows[ordinal] = self._context.rows[drawn.row]

    def _start(self) -> None:
        """Starts what the governor allows. The caller holds `_changed`."""
        while not self._closed and (ordinal := self.governor.may_start()) is not None:
            if self._idle_since is not None:
                self._idle_s += time.perf_counter() - self._idle_since
                self._idle_since = None
            self.governor.start(ordinal)
            position, row = self._drawn[ordinal].position, self._rows[ordinal]
            future = self._threads.submit(self._answer, position, row, ordinal)
            future.add_done_callback(partial(self._end, ordinal))

    def _answer(self, position: int, row: dict[str, Any], ordinal: int) -> Answered:
        metrics = Metrics()
        return Answered(self._source.answer_row(position, row, metrics, order=ordinal), metrics)

    def _end(self, ordinal: int, answered: Future[Answered]) -> None:
        """A thread has answered a row, or has failed, which ends the run."""
        with self._changed:
            self.governor.end(ordinal)
            if not self.governor.running:
                self._idle_since = time.perf_counter()
            if answered.cancelled():
                return
            if (error := answered.exception()) is not None:
                self._problem, self._closed = self._problem or error, True
            else:
                del self._rows[ordinal]
                self._done[ordinal] = answered.result()
                self._context.sampler.ended(ordinal)
                self._start()
            self._changed.notify_all()

    def _wait_for(self, ordinals: list[int]) -> list[Answered]:
        """Waits for the groups of this rank among these ordinals."""
        own = [ordinal for ordinal in ordinals if self.governor.owns(ordinal)]

        def what() -> str:
            missing = sum(ordinal not in self._done for ordinal in own)
            return f"rank {self._context.world.rank} waits for {missing} of {len(own)} groups of the next step"

        with waiting(what, "groups"), self._changed:
            while not self._done.keys() >= {*own}:
                if self._problem is not None:
                    raise self._problem
                self._changed.wait()
        return [self._done[ordinal] for ordinal in own]

    def _measure(self, groups: list[Group], step: int, metrics: Metrics) -> None:
        """Adds the ages of the tokens of a step to its rows and its metrics, and checks the bound."""
        assert self._first is not None
        found, staleness = list[Tensor](), self.governor.staleness
        for row in itertools.chain(*groups):
            ages = self._first + step - row["version"]  # (T,); of given tokens without a meaning
            row["ages"] = one_hot(ages.clamp(0, staleness), staleness + 1).bool()  # (T, S + 1)
            found.append(ages[row["response_mask"]])
        if found:
            ages = torch.cat(found)
            assert not len(ages) or 0 <= int(ages.min()) <= int(ages.max()) <= staleness, "too old"
            for age in range(staleness + 1):
                metrics.mean(f"staleness/age_{age}", ages == age)
            if len(ages):
                metrics.largest("staleness/max", ages.max())
        with self._changed:
            metrics.count("rollout/in_flight", len(self.governor.running))
            metrics.count("rollout/ahead", len(self._done))
            now = time.perf_counter()
            if self._idle_since is not None:
                self._idle_s, self._idle_since = self._idle_s + now - self._idle_since, now
            metrics.largest("time/engine_idle_s", self._idle_s)
            self._idle_s = 0.0

    def waiting(self) -> list[int]:
        """The positions of this rank that are drawn and neither trained nor dropped."""
        return [drawn.position for ordinal, drawn in self._drawn.items() if self.governor.owns(ordinal)]

    def close(self) -> None:
        """Gives up what is sampled."""
        with self._changed:
            self._closed, running = True, bool(self.governor.running)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if running:
            self._context.sampler.abort()

    def state_dict(self) -> dict[str, Any]:
        """Everything that is drawn and does not train yet, of all ranks, the groups that are done, and what is known of
        answers that are not. A collective."""
        own = [asdict(one) for one in self._context.sampler.begun()]  # first: what ends now is among the groups
        begun = [one for part in self._context.world.gather(own) for one in part]
        with self._changed:
            governor, done = self.governor, dict(self._done)
            drawn = [[ordinal, one.position, one.row] for ordinal, one in self._drawn.items()]
        groups = self._source.all_groups([keep_once(answered.group) for answered in done.values()])
        place = {"step": governor.step, "ordinal": governor.drawn, "first": self._first}
        return place | {"drawn": drawn, "done": groups, "begun": begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues: groups that were done, and answers that had begun, are kept where they are young enough."""
        governor, self._first = self.governor, state["first"]
        governor.step, governor.drawn = state["step"], state["ordinal"]
        governor.publish(governor.step)
        done = {int(group[0]["group"]): share_again(group) for group in state["done"]}
        governor.outstanding = [ordinal for ordinal, _, _ in state["drawn"]]
        stale = 0
        for place, (ordinal, position, row) in enumerate(state["drawn"]):
            self._drawn[ordinal] = Drawn(position, row)
            if not governor.owns(ordinal):
                continue
            group = done.get(position)
            if group is not None and _version(group) - (self._first or 0) >= governor.oldest(place):
                self._done[ordinal] = Answered(group, Metrics())
            else:
                stale += group is not None
                self._rows[ordinal] = self._context.rows[row]
                governor.again(ordinal)
        places = {ordinal: place for place, ordinal in enumerate(governor.outstanding) if ordinal in self._rows}
        begun = [one for one in (Begun(**one) for one in state["begun"]) if one.order in places]
        self._context.sampler.continue_from(
            [one for one in begun if min(one.versions) - (self._first or 0) >= governor.oldest(places[one.order])]
        )
        if stale:
            logging.getLogger(__name__).warning(
                "%d groups of the checkpoint are older than rollout.staleness=%d allows and are sampled again",
                stale, governor.staleness,
            )  # fmt: skip


def _version(group: Group) -> int:
    """The oldest version of a group's tokens."""
    return min(int(row["version"][row["response_mask"]].min()) for row in group)
