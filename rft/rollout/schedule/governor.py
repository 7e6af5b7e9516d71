"""Decides which prompts are sampled when, and which train next: first in, first out, with a bound on the age of tokens.

An ordinal is the place of a prompt in the order in which the run draws prompts. Step k, from 0, trains the first
`batch` ordinals that neither have been trained nor are dropped. Version v are the weights after v steps.

The rule: the ordinal at place i of those that wait for training starts only if i < (v + S + 1 - k) * batch, with
version v published, k the next step and S the staleness. The ordinals before it are trained or dropped, `batch` a step,
so it is trained at the latest in step k + i // batch <= v + S, with tokens of version v or later: no token that trains
is older than S versions. If the trainer waits, then v = k, so at least the first `batch` ordinals may start: no
deadlock. Which ordinals a step trains does not depend on how long their answers take: no length is preferred.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Governor:
    """The state of the rule. It has no clock, does no I/O and knows no process.

    Attributes:
        staleness: S.
        batch: ordinals that a step trains.
        in_flight: ordinals that are sampled at a time at most.
        last: ordinals that the run draws in all; None without limit.
        rank, ranks: this process samples the ordinals of which `owns` is true.
        version, step: v and k.
        drawn: the next ordinal.
        outstanding: ordinals that are drawn and neither trained nor dropped, in order.
        waiting: those of this process that have not started, in order.
        running: those of this process that are sampled.
    """

    staleness: int
    batch: int
    in_flight: int
    last: int | None = None
    rank: int = 0
    ranks: int = 1
    version: int = 0
    step: int = 0
    drawn: int = 0
    outstanding: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: set[int] = field(default_factory=set)

    def owns(self, ordinal: int) -> bool:
        """True if this process samples the ordinal: they are dealt out to the ranks in turn."""
        return ordinal % self.ranks == self.rank

    @property
    def allowed(self) -> int:
        """The first so many outstanding ordinals may start."""
        return (self.version + self.staleness + 1 - self.step) * self.batch

    def to_draw(self) -> int:
        """How many prompts to draw now."""
        left = self.allowed if self.last is None else self.last - self.drawn
        return max(0, min(self.allowed - len(self.outstanding), left))

    def draw(self, count: int) -> range:
        """Adds the next ordinals."""
        new = range(self.drawn, self.drawn + count)
        self.drawn += count
        self.outstanding += new
        self.waiting += filter(self.owns, new)
        return new

    def may_start(self) -> int | None:
        """The ordinal of this process that starts next; None while none may start."""
        if not self.waiting or len(self.running) >= self.in_flight:
            return None
        first = self.waiting[0]
        return first if bisect_left(self.outstanding, first) < self.allowed else None

    def start(self, ordinal: int) -> None:
        """The sampling of an ordinal begins."""
        self.waiting.remove(ordinal)
        self.running.add(ordinal)

    def end(self, ordinal: int) -> None:
        """The answers to an ordinal are sampled and scored."""
        self.running.remove(ordinal)

    def again(self, ordinal: int) -> None:
        """The answers to an ordinal are lost or too old: it starts again, in its place."""
        self.running.discard(ordinal)
        insort(self.waiting, ordinal)

    def next(self, known: int, count: int) -> list[int]:
        """The outstanding ordinals behind the first `known` ones, at most `count`."""
        return self.outstanding[known : known + count]

    def drop(self, ordinals: Iterable[int]) -> None:
        """These ordinals never train."""
        for ordinal in ordinals:
            del self.outstanding[bisect_left(self.outstanding, ordinal)]

    def train(self) -> list[int]:
        """The first ordinals train in the next step; the step after it is the next one then.

        Returns:
            `batch` ordinals, in order.
        """
        trained, self.outstanding = self.outstanding[: self.batch], self.outstanding[self.batch :]
        assert len(trained) == self.batch, "a step of too few prompts"
        self.step += 1
        return trained

    def publish(self, version: int) -> None:
        """Tokens are sampled with this version from now on."""
        assert version >= self.version, "versions grow"
        self.version = version

    def oldest(self, place: int = 0) -> int:
        """The oldest version of tokens that may train in the step in which an outstanding ordinal trains.

        Args:
            place: of the ordinal.
        """
        return self.step + place // self.batch - self.staleness
