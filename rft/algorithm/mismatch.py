"""How far the policy that trains is from the policy that sampled."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.kl import k1, k3
from rft.algorithm.ratio import log_ratio, ratio
from rft.metrics import Metrics

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

    The tokens with the largest gaps are recorded one by one at the end of the step.

    Args:
        metrics: receives them; each is a mean over all trained tokens (rows for `ppl_gap`) of the step.
        old_logprobs: (B, T).
        rows: a batch with `rollout_logprobs` (B, T) of the same tokens, and `loss_mask`, those that train.
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
