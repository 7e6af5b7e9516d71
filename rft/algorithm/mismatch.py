"""How far the policy that trains is from the policy that sampled."""

from torch import Tensor

from rft.algorithm.kl import k1, k3
from rft.algorithm.ratio import log_ratio, ratio
from rft.metrics import Metrics


def record_mismatch(metrics: Metrics, old_logprobs: Tensor, rollout_logprobs: Tensor, keep: Tensor) -> None:
    """Adds diagnostics of the gap between trainer and rollout engine, with rho = exp(old - rollout) of a trained token.

    `rollout/logprob_gap`, `rollout/logprob_gap_max`: mean and largest |log rho|.
    `rollout/kl`: KL(rollout, old), the k3 estimate rho - 1 - log rho; `rollout/kl_k1`: the plain one, -log rho, which
    is negative as often as not where the two policies are close.
    `rollout/kl_reverse`: KL(old, rollout) from the same tokens, rho log rho - (rho - 1), which is never negative.
    `rollout/ppl_gap`: the mean over rows of log(perplexity of old / perplexity of rollout); above 0 the trainer is the
    less sure. Its exp is what verl calls `ppl_ratio`, its negative `log_ppl_diff`.
    `rollout/chi2`: the chi-squared divergence of old from rollout, E[rho^2] - 1.
    `rollout/ess`: the effective sample size as a share of the tokens, (mean rho)^2 / mean rho^2; 1 without a mismatch.

    Args:
        metrics: receives them; each is a mean over all trained tokens (rows for `ppl_gap`) of the step.
        old_logprobs, rollout_logprobs: (B, T) of the same sampled tokens.
        keep: (B, T) bool, the trained tokens.
    """
    log_rho = log_ratio(old_logprobs.double(), rollout_logprobs, keep)  # (B, T)
    rho = ratio(log_rho)
    metrics.mean("rollout/logprob_gap", log_rho.abs(), keep)
    if log_rho.numel():
        metrics.largest("rollout/logprob_gap_max", log_rho.abs().max())
    metrics.mean("rollout/kl", k3(-log_rho), keep)
    metrics.mean("rollout/kl_k1", k1(-log_rho), keep)
    metrics.mean("rollout/kl_reverse", rho * log_rho - rho + 1, keep)
    metrics.mean("rollout/ppl_gap", -log_rho.sum(dim=1) / keep.sum(dim=1).clamp(min=1), keep.any(dim=1))
    metrics.mean("rollout/chi2", rho.square() - 1, keep)
    metrics.effective_share("rollout/ess", rho, keep)
