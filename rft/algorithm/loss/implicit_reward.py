"""The loss of an implicit process reward model: a language model whose log-ratio to the reference is a reward."""

from tensordict import TensorDict
from torch import Tensor, nn

from rft.algorithm.gradient import Gradient
from rft.algorithm.ratio import log_ratio
from rft.algorithm.registries import LOSSES, Unreduced
from rft.registry import in_range


@LOSSES.register(
    "implicit_reward",
    fault=in_range("beta", low=0, open=True),
    reads=("ref_logprobs", "terms"),
    unit="sequence",
    gradient=Gradient("exact", target="likelihood of the outcome"),
)
def implicit_reward(logprobs: Tensor, batch: TensorDict, *, beta: float, term: str) -> Unreduced:
    """Cross-entropy of sigmoid(beta * sum_t (lp - lp_ref)) against the outcome of the row, (B,).

    PRIME, arXiv 2502.01456, equation 4. Statistics (B,): `prm/accuracy`, 1 where the sign of the sum tells the outcome.

    Args:
        beta: scale of the process reward.
        term: the raw reward term that is the outcome, between 0 and 1.
    """
    logits = beta * log_ratio(logprobs, batch["ref_logprobs"], batch["loss_mask"]).sum(1)  # (B,)
    outcome = batch["terms", term].to(logits.dtype)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, outcome, reduction="none")
    trained = batch["loss_mask"].any(1)
    right = ((logits > 0) == (outcome > 0.5)).to(logits.dtype)
    return loss.where(trained, 0.0), {"prm/accuracy": right.where(trained, 0.0)}
