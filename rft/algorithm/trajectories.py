"""Trajectories of several rows: dialogues that were cut, compacted, branched, or written as a row per turn.

Such rows have one number in the column `trajectory`, and each token trains in one of them. Everything that counts rows,
compares them or runs over their tokens is meant for whole trajectories: the functions of an algorithm are called with
the rows of a trajectory joined into one row, and what they write is split over the rows again.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tensordict import TensorDict
from torch import Tensor

from rft.imports import import_part

# A part, which a run with episodes of several rows imports: its module and its class.
JOINED = ("rft.algorithm.joined_trajectories", "JoinedTrajectories")


class Trajectories(ABC):
    """N trajectories, and where the tokens of their rows are in joined rows."""

    @abstractmethod
    def join(self, column: Tensor) -> Tensor:
        """A column of the rows, (B,), (B, T) or (B, T, K), as that of the joined rows. Differentiable.

        A number a row is taken from the row of the last turn.
        """

    @abstractmethod
    def split(self, column: Tensor) -> Tensor:
        """A column of the joined rows as that of the rows: a token's number at its token, a row's in all its rows."""

    @abstractmethod
    def of_copy(self, batch: TensorDict) -> "Trajectories":
        """The same trajectories, of a copy of the batch on another device."""

    @property
    @abstractmethod
    def is_last(self) -> Tensor:
        """The rows of the last turns, one a trajectory, (B,) bool."""

    @property
    @abstractmethod
    def rows(self) -> TensorDict:
        """The joined rows. A trajectory is `truncated` if one of its rows is; `media` are left out."""


def trajectories_of(batch: TensorDict) -> Trajectories | None:
    """The trajectories of a batch; None where each of them is one row."""
    if "trajectory" not in batch.keys() or len(batch["trajectory"].unique()) == len(batch):
        return None
    joined: Trajectories = import_part(*JOINED, "the column trajectory")(batch)
    return joined


@contextmanager
def joined_rows(
    batch: TensorDict, outputs: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[TensorDict, dict[str, Tensor]]]:
    """The rows of each trajectory as one; the columns that are written there are split over the rows at the end.

    Where no trajectory has several rows, they are the rows themselves.

    Args:
        batch: of whole trajectories.
        outputs: of a model for the rows, which are joined, too.
    """
    outputs, trajectories = dict(outputs or {}), trajectories_of(batch)
    if trajectories is None:
        yield batch, outputs
        return
    rows = trajectories.rows
    before = {name: rows.get(name) for name in rows.keys()}
    yield rows, {name: trajectories.join(column) for name, column in outputs.items()}
    for name in rows.keys():
        column = rows.get(name)
        if isinstance(column, Tensor) and column is not before.get(name):
            batch[name] = trajectories.split(column)
