"""Two roles of one's own, each with a column: a frozen model that only counts, and one that trains beside the policy.

`novelty` is written by a `ColumnModel` without weights and read by an advantage; `imitator_logprobs` is written by an
`Actor` that trains with a loss of its own and is read by the same advantage.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.base import ColumnModel, Columns, ModelContext, ModelOptions
from rft.algorithm import ADVANTAGES, LOSSES
from rft.algorithm.roles import ROLES, Role

ROLES.register(Role("counter", {"novelty": "novelty"}, head="lm", loss=None, follows=False))
ROLES.register(Role("imitator", {"imitator_logprobs": "logprobs"}, head="lm", loss="imitator_loss"))


@dataclass(frozen=True)
class CounterOptions(ModelOptions):
    """What `TokenCounter` reads.

    Args:
        scale: of the column.
    """

    scale: float


class TokenCounter(ColumnModel):
    """Computes `novelty` (B, T): 1 / (1 + how often the token was trained in earlier steps)."""

    Options = CounterOptions

    def __init__(self, context: ModelContext, options: CounterOptions) -> None:
        super().__init__(context, options)
        self.scale = options.scale
        self.counts: Counter[int] = Counter()

    def compute_outputs(
        self, batch: TensorDict, outputs: tuple[str, ...], temperature: float, dummy: TensorDict | None
    ) -> Columns:
        assert outputs == ("novelty",)
        tokens, keep = batch["tokens", "input_ids"], batch["loss_mask"]
        seen = torch.tensor([[self.counts[token] for token in row] for row in tokens.tolist()])
        for rank_tokens in self.world.gather(tokens[keep].tolist()):
            self.counts.update(rank_tokens)
        return {"novelty": self.scale * keep / (1.0 + seen)}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = Counter(state["counts"])


@ADVANTAGES.register("novelty", reads=("novelty", "imitator_logprobs"))
def novelty(scores: Tensor, rewards: Tensor, batch: TensorDict, *, surprise: float) -> dict[str, Tensor]:
    """The score, the novelty of each token, and how unlikely the imitator finds it, (B, T)."""
    bonus = batch["novelty"] - surprise * batch["imitator_logprobs"]
    return {"advantages": (scores[:, None] + bonus) * batch["loss_mask"]}


@LOSSES.register("imitation")
def imitation(logprobs: Tensor, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative log-likelihood of what the policy wrote."""
    return -logprobs, {}
