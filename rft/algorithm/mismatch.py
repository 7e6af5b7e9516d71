"""How far the policy that trains is from the policy that sampled."""

from torch import Tensor


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Per-token diagnostics of the gap between trainer and rollout engine.

    Args:
        old_logprobs, rollout_logprobs: (B, T) of the same sampled tokens.

    Returns:
        `rollout/logprob_gap`, the absolute difference, and `rollout/kl`, the k3 estimate of KL(rollout, old); (B, T).
    """
    log_ratio = (old_logprobs - rollout_logprobs).clamp(-20, 20)
    return {"rollout/logprob_gap": log_ratio.abs(), "rollout/kl": log_ratio.exp() - 1 - log_ratio}
