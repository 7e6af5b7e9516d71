"""How far two policies are apart at the sampled tokens: log-ratios and ratios, estimates of the KL divergence, and the
policy that trains compared with the policy that sampled.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.metrics import Metrics

LARGEST_LOG_RATIO = 20.0


def log_ratio(logprobs: Tensor, other: Tensor, keep: Tensor) -> Tensor:
    """logprobs - other at the trained tokens, 0 elsewhere (B, T); float32 at least."""
    difference = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32)) - other
    return torch.where(keep, difference, 0.0)


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-20; beyond the clamp it has no gradient."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def k1(d: Tensor) -> Tensor:
    """d. Unbiased, and negative as often as not. (http://joschu.net/blog/kl-approx.html, for k1 to k3.)"""
    return d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2. Biased, low variance."""
    return 0.5 * d.square()


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d. Unbiased and never negative. d is clamped to at least -20, so exp does not overflow.

    expm1, because near 0 the difference of exp(-d) and 1 is mostly rounding.
    """
    d = d.clamp(min=-LARGEST_LOG_RATIO)  # in both places: d alone would push a token the wrong way beyond the clamp
    return torch.expm1(-d) + d


def straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    """The value of one estimate with the gradient of another."""
    return gradient + (value - gradient).detach()


def binary_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """KL((p, 1 - p), (q, 1 - q)) of two log-probabilities of one token; float32 at least, of the shape given."""
    smallest = torch.finfo(logprobs.dtype).eps  # what a probability that is rounded to 1 may leave to the other tokens
    rest, other_rest = ((-torch.expm1(column)).clamp(min=smallest) for column in (logprobs, other))
    return logprobs.exp() * (logprobs - other) + rest * (rest.log() - other_rest.log())


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": torch.abs}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: Literal["k1", "k2", "k3", "abs"]) -> Tensor:
    """The KL per token that goes into the reward, of d = logprobs - ref_logprobs; float32 at least.

    Args:
        logprobs, ref_logprobs: (B, T), of the tokens that the first policy sampled.
        estimator: k1 makes the reward exact; the others are there for comparison with published runs.
    """
    d = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32)) - ref_logprobs
    return ESTIMATORS[estimator](d)  # (B, T)


WORST = 5  # tokens of a step that are written one by one
CONTEXT = 8  # tokens before each of them
RECORD = {  # of each: of its row, its position in the response, its id, and its log-probabilities
    "group": int,
    "unit": int,
    "position": int,
    "token": int,
    "trainer": float,
    "engine": float,
}
TOLERANCE = {"float32": 1e-4, "float16": 0.06, "bfloat16": 0.5}  # largest allowed gap of a token, in nats


def log_policy_mismatch(metrics: Metrics, old_logprobs: Tensor, rows: TensorDict) -> None:
    """Adds diagnostics of the gap between trainer and rollout engine, with rho = exp(old - rollout) of a trained token.

    `rollout/logprob_gap`, `rollout/logprob_gap_max`: mean and largest |log rho|.
    `rollout/kl`: KL(rollout, old), the k3 estimate rho - 1 - log rho; `rollout/kl_k1`: the k1 estimate, -log rho,
    which is often negative if the two policies are close.
    `rollout/kl_reverse`: KL(old, rollout) from the same tokens, rho log rho - (rho - 1), which is never negative.
    `rollout/ppl_gap`: the mean over rows of log(perplexity of old / perplexity of rollout); above 0 the trainer
    finds the tokens less likely than the engine. It is verl's `log_ppl_diff`, except for rows without a trained token,
    which verl counts as 0; verl's `ppl_ratio` is the mean over rows of the ratio, not the exp of this mean.
    `rollout/chi2`: the chi-squared divergence of old from rollout, E[rho^2] - 1.
    `rollout/ess`: the effective sample size as a share of the tokens, (mean rho)^2 / mean rho^2; 1 without a mismatch.
    `rollout/ess_age_<n>`: that of the tokens whose weights are n versions old, of text that was sampled ahead.

    The tokens with the largest gaps are recorded one by one at the end of the step.

    Args:
        metrics: receives them; each is a mean over all trained tokens (rows for `ppl_gap`) of the step.
        old_logprobs: (B, T).
        rows: a batch with `rollout_logprobs` (B, T) of the same tokens, and `loss_mask`, those that train; with
            `ages` (B, T, S + 1) where text was sampled ahead.
    """
    keep, rollout_logprobs = rows["loss_mask"], rows["rollout_logprobs"]
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
    if "ages" in rows.keys():
        for age, of_age in enumerate(rows["ages"].unbind(-1)):
            metrics.effective_share(f"rollout/ess_age_{age}", rho, keep & of_age)
    metrics.notes(worst_tokens(old_logprobs, rows), token_record)


def worst_tokens(logprobs: Tensor, rows: TensorDict) -> Tensor:
    """The tokens whose log-probability (B, T) is farthest from that of the engine, the farthest first.

    Returns:
        (W, 7 + CONTEXT) float64 on the device, of at most `WORST` tokens: the gap, -1 of a token that does not train;
        the numbers of `RECORD`; and the ids of the tokens in front of it, or -1.
    """
    keep, ids = rows["loss_mask"], rows["tokens", "input_ids"]
    gaps = log_ratio(logprobs, rows["rollout_logprobs"], keep).abs().masked_fill(~keep, -1.0).flatten()  # (B * T,)
    largest, places = gaps.topk(min(WORST, len(gaps)))  # (W,)
    row, column = places // keep.shape[1], places % keep.shape[1]
    window = column[:, None] + torch.arange(CONTEXT, device=ids.device)
    before = torch.nn.functional.pad(ids, (CONTEXT, 0), value=-1)[row[:, None], window]  # (W, CONTEXT)
    numbers = (
        largest,
        rows["group"][row],
        rows["unit"][row],
        column - rows["response_mask"].int().argmax(1)[row],
        ids[row, column],
        logprobs[row, column],
        rows["rollout_logprobs"][row, column],
    )
    return torch.cat([torch.stack([number.double() for number in numbers], 1), before.double()], 1)


def token_record(numbers: list[float]) -> tuple[float, dict[str, Any]] | None:
    """The gap and the record of a token, from a row of `worst_tokens`; None for a token that does not train.

    A record has the numbers of `RECORD`, and `before`, the ids of the tokens in front of it.
    """
    gap, rest = numbers[0], numbers[1:]
    if not gap >= 0:  # NaN, too
        return None
    record: dict[str, Any] = {name: kind(number) for (name, kind), number in zip(RECORD.items(), rest, strict=False)}
    return gap, record | {"before": [int(token) for token in rest[len(RECORD) :] if token >= 0]}
