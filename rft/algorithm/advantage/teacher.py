"""The advantage of on-policy distillation: how much likelier a teacher finds what the policy has sampled."""

from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.advantage.returns import following
from rft.algorithm.gradient import Gradient
from rft.algorithm.ratio import log_ratio
from rft.algorithm.registries import ADVANTAGES
from rft.ranges import Fraction


def _gradient(gamma: float) -> Gradient:
    if gamma == 1:
        return Gradient("exact", target="likeness to the teacher")
    left_out = "omits the effect of a token on later tokens"
    return Gradient("near", target="likeness to the teacher", cosine=0.988, note=left_out)


@ADVANTAGES.register(
    "teacher",
    reads=("teacher_logprobs", "old_logprobs"),
    raw=True,
    gradient=_gradient,
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
