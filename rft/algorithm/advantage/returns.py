"""Advantages from the rewards that follow a token. A step is a trained token: tokens between two of them (tool output,
a rejected token) are skipped and take no discount.

The rewards may be those of other models: an implicit process reward, beta times the log-ratio of a reward model to the
reference, or how much likelier a teacher finds what the policy has sampled (on-policy distillation).
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import ADVANTAGES, AllSum, Gradient
from rft.algorithm.advantage.baselines import weighted_centred
from rft.algorithm.divergence import log_ratio
from rft.algorithm.scores.groups import dense_numbers, group_statistics
from rft.algorithm.statistics import whitened
from rft.ranges import Fraction, PositiveFloat


def _gradient_of_reinforce(gamma: float) -> Gradient:
    if gamma == 1:
        return Gradient("exact")
    return Gradient("near", note="a discount lowers the scores of longer answers")


@ADVANTAGES.register("reinforce", gradient=_gradient_of_reinforce)
def reinforce(scores: Tensor, rewards: Tensor, batch: TensorDict, *, gamma: Fraction) -> dict[str, Tensor]:
    """G_t = r_t + gamma G_{t+1}, and no baseline. REINFORCE, Williams 1992, doi 10.1007/BF00992696.

    Args:
        gamma: discount per trained token.
    """
    return {"advantages": following(rewards, batch["loss_mask"], gamma)}


@ADVANTAGES.register(
    "reinforce_pp",
    gradient=Gradient("near", cosine=0.978, note="its scale and baseline are random"),
)
def reinforce_pp(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, gamma: Fraction
) -> dict[str, Tensor]:
    """G_t = r_t + gamma G_{t+1}, whitened over the trained tokens of all ranks. REINFORCE++, arXiv 2501.03262.

    Args:
        gamma: discount per trained token.
    """
    return {"advantages": whitened(following(rewards, batch["loss_mask"], gamma), batch["loss_mask"], all_sum)}


@ADVANTAGES.register("remax", reads=("greedy_scores",), gradient=Gradient("exact"))
def remax(scores: Tensor, rewards: Tensor, batch: TensorDict) -> dict[str, Tensor]:
    """G_t - score of the greedy answer to the same prompt, G_t not discounted. ReMax, arXiv 2310.10505, section 3.

    The greedy score is the raw one, without KL: a baseline may be any number that the sampled answer does not change.
    """
    advantages = following(rewards, batch["loss_mask"], 1.0) - batch["greedy_scores"].to(rewards.dtype)[:, None]
    return {"advantages": torch.where(batch["loss_mask"], advantages, 0.0)}


@ADVANTAGES.register(
    "optimal_token_baseline",
    reads=("sum_p_squared", "old_logprobs"),
    group_baseline=True,
    gradient=Gradient("near", cosine=0.984, note="a row's own return and tokens are in its baseline"),
)
def optimal_token_baseline(scores: Tensor, rewards: Tensor, batch: TensorDict) -> dict[str, Tensor]:
    """G_t - sum_g G_t W_t / sum_g W_t, W_t = sum_{s <= t} (1 - 2 p_s + sum_v p_v^2). ArXiv 2602.07078.

    W_t stands for the squared norm of the gradient up to the token: the summand is that of the log-softmax by its
    logits. t counts trained tokens; the sums are over the rows of the group that have a t-th one. Where they are all
    equal, or there is one alone, the advantage is 0. G_t is not discounted.
    """
    keep = batch["loss_mask"]
    energy = 1 - 2 * batch["old_logprobs"].double().exp() + batch["sum_p_squared"]  # (B, T) of the distribution at t
    weights = torch.where(keep, energy.clamp(min=0), 0.0).cumsum(dim=1)  # (B, T); rounding may go below 0
    group = dense_numbers(batch["group"])
    place = group[:, None] * keep.shape[1] + keep.cumsum(dim=1) - 1  # (B, T) one number for a group and a t
    returns = following(rewards.double(), keep, 1.0)
    advantages = torch.zeros_like(rewards)
    advantages[keep] = weighted_centred(returns[keep], weights[keep], place[keep]).to(rewards.dtype)
    return {"advantages": advantages}


def _gradient_of_gae(gamma: float, lam: float, whiten: bool) -> Gradient:
    if gamma == 1 and lam == 1 and not whiten:
        return Gradient("exact")
    return Gradient("near", cosine=0.882, note="as biased as the critic; exact with gamma = lam = 1, not whitened")


@ADVANTAGES.register(
    "gae",
    reads=("values",),
    writes=("advantages", "returns"),
    gradient=_gradient_of_gae,
)
def gae(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, gamma: Fraction, lam: Fraction, whiten: bool
) -> dict[str, Tensor]:
    """delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}. GAE, arXiv 1506.02438, section 3.

    The value after the last trained token is 0. `returns` is A + V, before the whitening.

    Args:
        gamma: discount per trained token.
        lam: between 0 (one step) and 1 (the return less the value).
        whiten: whitens the advantages over the trained tokens of all ranks.
    """
    keep, values = batch["loss_mask"], batch["values"]
    advantages = estimate(rewards, values, keep, gamma, lam)
    returns = torch.where(keep, advantages + values, 0.0)
    return {"advantages": whitened(advantages, keep, all_sum) if whiten else advantages, "returns": returns}


@ADVANTAGES.register(
    "gae_length_adaptive",
    reads=("values",),
    writes=("advantages", "returns"),
    gradient=Gradient("near", cosine=0.699, note="as biased as the critic"),
)
def gae_length_adaptive(
    scores: Tensor,
    rewards: Tensor,
    batch: TensorDict,
    *,
    all_sum: AllSum,
    gamma: Fraction,
    alpha: PositiveFloat,
    whiten: bool,
) -> dict[str, Tensor]:
    """`gae` with lam = 1 - 1 / (alpha L) for a row of L trained tokens, 0 at least. VAPO, arXiv 2504.05118, section 4.

    `returns` has lam = 1 (decoupled GAE): what the critic learns from does not depend on the critic.

    Args:
        gamma: discount per trained token.
        alpha: above 0; how far a reward reaches back, as a share of the row. Up to 1 / alpha tokens, lam is 0.
        whiten: whitens the advantages over the trained tokens of all ranks.
    """
    keep, values = batch["loss_mask"], batch["values"]
    lam = (1 - 1 / (alpha * keep.sum(dim=1).double().clamp(min=1))).clamp(min=0)  # (B,)
    advantages = estimate(rewards, values, keep, gamma, lam)
    returns = following(rewards, keep, gamma)
    return {"advantages": whitened(advantages, keep, all_sum) if whiten else advantages, "returns": returns}


def following(rewards: Tensor, keep: Tensor, gamma: float) -> Tensor:
    """The discounted sum of the rewards from a trained token on, (B, T), zero outside `loss_mask`."""
    return estimate(rewards, torch.zeros_like(rewards), keep, gamma, lam=1.0)


def estimate(rewards: Tensor, values: Tensor, keep: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    """The recursion of `gae` over the trained tokens, (B, T), zero outside `loss_mask`; lam is a number or (B,).

    Trained tokens are moved to the front, so that the loop over time has no gaps and as many iterations as the longest
    row has trained tokens.
    """
    longest = max(keep.sum(dim=1).tolist(), default=0)
    order = keep.int().argsort(dim=1, descending=True, stable=True)[:, :longest]  # (B, L)
    reward = torch.where(keep, rewards.double(), 0.0).gather(1, order)  # (B, L)
    value = torch.where(keep, values.double(), 0.0).gather(1, order)  # (B, L)
    steps = torch.zeros_like(reward)
    advantage = after = reward.new_zeros(len(reward))  # (B,)
    for t in reversed(range(longest)):  # behind a row's last trained token everything is 0 and stays 0
        advantage = reward[:, t] + gamma * after - value[:, t] + gamma * lam * advantage
        after = value[:, t]
        steps[:, t] = advantage
    return torch.zeros_like(rewards).scatter(1, order, steps.to(rewards.dtype))


@ADVANTAGES.register(
    "prime",
    reads=("prm_logprobs", "ref_logprobs"),
    group_baseline=True,
    gradient=Gradient(
        "near", target="reward and process reward", cosine=1.0, note="a baseline per token favours one length of answer"
    ),
)
def prime(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, beta: PositiveFloat, gamma: Fraction
) -> dict[str, Tensor]:
    """Leave-one-out on the score, plus returns of p_t = beta (lp_prm - lp_ref), less the others' mean p.

    A_t = R - mean of the others' R + sum over s >= t of gamma^(s-t) (p_s - b), b the mean over the others of mean p.
    PRIME, arXiv 2502.01456, equation 5. A group of one has no others: 0.

    Args:
        beta: scale of the process reward; the same as in the loss of the reward model.
        gamma: discount per trained token.
    """
    keep, group = batch["loss_mask"], batch["group"]
    process = beta * log_ratio(batch["prm_logprobs"], batch["ref_logprobs"], keep).double()  # (B, T)
    mean = process.sum(1) / keep.sum(1).clamp(min=1)  # (B,)
    size = group_statistics(mean, group).size
    others = (size - 1).clamp(min=1)
    baseline = (group_statistics(mean, group).mean * size - mean) / others  # (B,)
    outcome = group_statistics(scores, group).centred * size / others
    dense = following(process - baseline[:, None], keep, gamma)  # (B, T)
    advantages = torch.where(keep & (size > 1)[:, None], dense + outcome[:, None], 0.0)
    return {"advantages": advantages.to(scores.dtype)}


def _gradient_of_teacher(gamma: float) -> Gradient:
    if gamma == 1:
        return Gradient("exact", target="likeness to the teacher")
    left_out = "omits the effect of a token on later tokens"
    return Gradient("near", target="likeness to the teacher", cosine=0.988, note=left_out)


@ADVANTAGES.register(
    "teacher",
    reads=("teacher_logprobs", "old_logprobs"),
    raw=True,
    gradient=_gradient_of_teacher,
)
def teacher(scores: Tensor, rewards: Tensor, batch: TensorDict, *, gamma: Fraction) -> dict[str, Tensor]:
    """A_t = d_t + gamma A_{t+1}, d = lp_teacher - lp_old of the sampled token: minus an estimate of the reverse KL.

    Thinking Machines, On-Policy Distillation, 2025, https://thinkingmachines.ai/blog/on-policy-distillation/, with
    gamma 0. Scores are not used.

    Args:
        gamma: discount per trained token. With 1 the gradient is that of KL(policy, teacher) of whole answers.
    """
    closer = log_ratio(batch["teacher_logprobs"], batch["old_logprobs"], batch["loss_mask"])  # (B, T)
    return {"advantages": following(closer.to(scores.dtype), batch["loss_mask"], gamma)}
