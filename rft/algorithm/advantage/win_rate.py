"""How often an answer wins against the others to its prompt, for games that a policy plays against itself."""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.advantage.group import spread
from rft.algorithm.gradient import Gradient
from rft.algorithm.registries import ADVANTAGES
from rft.algorithm.scores.groups import ROUNDING
from rft.ranges import PositiveFloat


def wins(scores: Tensor, others: Tensor, softness: float | None) -> Tensor:
    """The chance that an answer is preferred to another one, by their scores, which are broadcast; float64.

    Args:
        softness: sigmoid of the difference by this; null: the higher score wins, and equal ones (up to rounding) have
            one half each.
    """
    scores, others = torch.broadcast_tensors(scores.double(), others.double())
    if softness is not None:
        return torch.sigmoid((scores - others) / softness)
    tied = (scores - others).abs() <= ROUNDING * torch.maximum(scores.abs(), others.abs())
    return torch.where(tied, 0.5, (scores > others).double())


@ADVANTAGES.register(
    "win_rate",
    group_baseline=True,
    gradient=Gradient("scaled", "win rate", lambda n: (n - 1) / n, note="a row is compared with itself, too"),
)
def win_rate(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, softness: PositiveFloat | None
) -> dict[str, Tensor]:
    """P - 1/2, P the mean probability to be preferred to a row, over all n of the group. SPPO, arXiv 2405.00675.

    The paper's estimate of P(y > policy) by the answers that were sampled, the row itself among them.

    Args:
        softness: null: the higher score is preferred. A number: preferred with the chance sigmoid(difference / it),
            which for the scores of a reward model of the Bradley-Terry kind is 1.
    """
    _, index, sizes = torch.unique(batch["group"], return_inverse=True, return_counts=True)
    rates = torch.empty(len(scores), dtype=torch.float64, device=scores.device)
    for rows in index.argsort(stable=True).split(sizes.tolist()):
        rates[rows] = wins(scores[rows, None], scores[rows], softness).mean(1)
    return {"advantages": spread(rates - 0.5, scores, batch)}
