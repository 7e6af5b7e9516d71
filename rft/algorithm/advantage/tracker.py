"""Advantages against the scores of earlier steps, of a prompt or of an agent: they need no second answer."""

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import ADVANTAGES, AllSum, Gradient
from rft.algorithm.advantage.group import spread
from rft.algorithm.statistics import whitened
from rft.ranges import Fraction


@ADVANTAGES.register(
    "spo",
    reads=("baseline_scores",),
    gradient=Gradient("near", cosine=0.997, note="rows are in the mean that whitening subtracts"),
)
def spo(scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum) -> dict[str, Tensor]:
    """R - p, whitened over the rows of all ranks that have a trained token. SPO, arXiv 2509.13232, section 3.

    p is `baseline_scores` (B,): the solve rate of the prompt as the source knew it before these answers. It does
    not depend on them, so it does not bias the gradient, even if R has another scale.
    """
    trained = batch["loss_mask"].any(-1)  # (B,)
    advantage = whitened(scores.double() - batch["baseline_scores"].double(), trained, all_sum)
    return {"advantages": spread(advantage, scores, batch)}


class AgentBaselines:
    """The moving average of the scores of every agent.

    Attributes:
        means: by agent; 0 for an agent that is not in it.
    """

    def __init__(self) -> None:
        self.means: dict[int, float] = {}

    def numbers(self) -> dict[str, float]:
        """What a step logs."""
        return {f"baseline_{agent}": mean for agent, mean in self.means.items()}

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {str(agent): mean for agent, mean in self.means.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores what `state_dict` returned."""
        self.means = {int(agent): mean for agent, mean in state.items()}


@ADVANTAGES.register("rae", reads=("agent",), state=AgentBaselines, gradient=Gradient("exact"))
def rae(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, state: AgentBaselines, decay: Fraction
) -> dict[str, Tensor]:
    """R - b, b the moving average of the scores of the row's agent. RAE of SPIRAL, arXiv 2506.24119, section 3.

    b is that of the steps before, so it does not depend on R. After n scores of an agent in a step, on all ranks, it is
    decay^n b + (1 - decay^n) * their mean: the scores have no order. It begins at 0.

    Args:
        batch: with `agent` (B,), small numbers from 0 on: a player, or a role in a game.
        decay: per score.
    """
    agents = batch["agent"]
    count = int(all_sum(1 + agents.max() if len(agents) else agents.sum()))  # at least the largest number of all ranks
    sums = scores.new_zeros(2, count, dtype=torch.float64)
    sums = all_sum(sums.index_add(1, agents, torch.stack([torch.ones_like(scores), scores]).double()))
    before = scores.new_tensor([state.means.get(agent, 0.0) for agent in range(count)], dtype=torch.float64)
    for agent, (number, total) in enumerate(sums.T.tolist()):
        if number:
            kept = decay**number
            state.means[agent] = kept * state.means.get(agent, 0.0) + (1 - kept) * total / number
    return {"advantages": spread(scores.double() - before[agents], scores, batch)}
