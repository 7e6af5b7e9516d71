"""The ledger of a run: what became of each position in the data.

A position is one draw of a row by the source of a stage. It is trained on, dropped for a reason, or waits for a later
step. A position without an entry was skipped by the sampler, because its row has weight 0.
"""

import copy
from bisect import bisect_right

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.batch.scores import is_scored
from rft.data.base import Source
from rft.distributed import World

TRAINED, AGAIN, NO_LOSS, WAITING = "trained", "trained again", "no token trains", "waiting"
NOT_FINITE, UNSCORED = "not finite", "no score"
Ranges = list[list[int]]  # first and last position of each range, in order


class Ledger:
    """The positions of each stage by what became of them.

    Args:
        world: all processes; every rank has the whole ledger.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._stages: dict[str, dict[str, Ranges]] = {}

    def record(self, stage: str, source: Source, batch: TensorDict, not_finite: list[int]) -> None:
        """Adds the groups of a step, and what the source has dropped since the step before and keeps for later ones.

        A collective.

        Args:
            not_finite: units of the step that every update has dropped.
        """
        groups: Tensor = batch["group"]
        trains = batch["loss_mask"].any(-1)
        lost = torch.isin(batch["unit"], torch.tensor(not_finite, dtype=torch.int64))
        trained = set(groups[trains & ~lost].tolist())
        spoilt = set(groups[trains & lost].tolist()) - trained
        scored = is_scored(batch["scores"]) if "scores" in batch.keys() else torch.ones_like(trains)
        untrained = set(groups.tolist()) - trained - spoilt
        unscored = untrained - set(groups[scored].tolist())
        entries = {
            TRAINED: sorted(trained),
            NOT_FINITE: sorted(spoilt),
            UNSCORED: sorted(unscored),
            NO_LOSS: sorted(untrained - unscored),
            **source.dropped(),
        }
        known = self._stages.setdefault(stage, {})
        known.pop(WAITING, None)
        for part in self._world.gather({**entries, WAITING: source.waiting()}):
            for outcome, positions in part.items():
                for position in positions:
                    if not add(known.setdefault(outcome, []), position) and outcome == TRAINED:
                        add(known.setdefault(AGAIN, []), position)

    def state_dict(self) -> dict[str, dict[str, Ranges]]:
        """The ledger as ranges."""
        return self._stages

    def load_state_dict(self, state: dict[str, dict[str, Ranges]]) -> None:
        """Takes over what `state_dict` returned."""
        self._stages = copy.deepcopy(state)


def add(spans: Ranges, position: int) -> bool:
    """Adds a position to ranges, in place; False if they have it already."""
    after = bisect_right(spans, position, key=lambda span: span[0])
    if after and spans[after - 1][1] >= position:
        return False
    joins_before = after > 0 and spans[after - 1][1] == position - 1
    joins_after = after < len(spans) and spans[after][0] == position + 1
    if joins_before and joins_after:
        spans[after - 1][1] = spans.pop(after)[1]
    elif joins_before:
        spans[after - 1][1] = position
    elif joins_after:
        spans[after][0] = position
    else:
        spans.insert(after, [position, position])
    return True
