"""Divergences from a teacher against numbers worked by hand, and the advantage of on-policy distillation."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm.advantage.returns import teacher
from rft.algorithm.loss.distillation import forward_kl, jsd, reverse_kl
from tests.helpers import batch_of

F64 = torch.float64
KEEP = torch.tensor([[0, 1, 1, 0]], dtype=torch.bool)
LOSSES = {"forward": forward_kl, "reverse": reverse_kl, "jsd": lambda *given: jsd(*given, beta=0.3)}
# of the teacher and of the policy, the two tokens that the teacher finds likeliest; 0.2 and 0.5 are left for others
Q, P = (0.5, 0.3), (0.25, 0.25)


def column(*tokens):
    """Log-probabilities (1, 4, K) whose two trained tokens are given, with nonsense in the others."""
    known = [torch.tensor(token, dtype=F64).log() for token in tokens]
    nonsense = torch.full_like(known[0], 7.0)
    return torch.stack([nonsense, *known, nonsense])[None]


def of_teacher(*logprobs):
    return batch_of(KEEP, teacher_top_logprobs=column(*logprobs))


def kl(one, other):
    return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True))


def by_hand(name, q, p):
    mixture = [0.3 * a + 0.7 * b for a, b in zip(q, p, strict=True)]
    return {"forward": kl(q, p), "reverse": kl(p, q), "jsd": 0.3 * kl(q, mixture) + 0.7 * kl(p, mixture)}[name]


@pytest.mark.parametrize("name", LOSSES)
def test_by_hand(name):
    """With others as one outcome more, and, in the second token, as likely as with all of the vocabulary."""
    found, statistics = LOSSES[name](column(P, (0.1, 0.9)), of_teacher(Q, (0.6, 0.4)))
    expected = [0.0, by_hand(name, (*Q, 0.2), (*P, 0.5)), by_hand(name, (0.6, 0.4), (0.1, 0.9)), 0.0]
    assert found[0].tolist() == pytest.approx(expected, abs=1e-14) and statistics == {}


def test_two_values_in_numbers():
    # 0.5 ln 2 + 0.3 ln 1.2 + 0.2 ln 0.4 and 0.25 ln 0.5 + 0.25 ln (5 / 6) + 0.5 ln 2.5
    assert forward_kl(column(P, P), of_teacher(Q, Q))[0][0, 1].item() == pytest.approx(0.2180119, abs=1e-7)
    assert reverse_kl(column(P, P), of_teacher(Q, Q))[0][0, 1].item() == pytest.approx(0.2392782, abs=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_agreement_is_the_one_minimum(name):
    logits = torch.randn(1, 4, 3, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    policy = logits.log_softmax(-1)[..., :2]
    found = LOSSES[name](policy, batch_of(KEEP, teacher_top_logprobs=policy.detach()))[0]
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert found.abs().max() < 1e-15 and gradient.abs().max() < 1e-15
    others = [
        LOSSES[name](column((a, b), (b, a)), of_teacher(Q, Q))[0] for a, b in ((0.1, 0.2), (0.5, 0.4), (0.2, 0.79))
    ]
    assert all((found[KEEP] > 1e-3).all() for found in others)


def test_the_jsd_is_symmetric_in_the_middle_and_a_kl_at_its_ends():
    policy, batch = column(P, (0.1, 0.9)), of_teacher(Q, (0.6, 0.4))
    swapped = batch_of(KEEP, teacher_top_logprobs=policy)
    there, back = jsd(policy, batch, beta=0.5)[0], jsd(batch["teacher_top_logprobs"], swapped, beta=0.5)[0]
    torch.testing.assert_close(there, back, rtol=1e-14, atol=0)
    for beta, limit in ((1e-6, forward_kl), (1 - 1e-6, reverse_kl)):
        small = min(beta, 1 - beta)
        torch.testing.assert_close(jsd(policy, batch, beta=beta)[0] / small, limit(policy, batch)[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_left_over_by_rounding_is_no_outcome(name):
    """float32, and tokens that have all of the probability but for a rounding error: nothing is lost or infinite."""
    said = torch.randn(1, 4, 50, generator=torch.Generator().manual_seed(1)).mul(20).log_softmax(-1).requires_grad_()
    batch = batch_of(KEEP, teacher_top_logprobs=said.detach().flip(-1))
    found = LOSSES[name](said, batch)[0]
    (gradient,) = torch.autograd.grad(found.sum(), said)
    batch["teacher_top_logprobs"] = batch["teacher_top_logprobs"].double()
    exact = LOSSES[name](said.double(), batch)[0]
    assert gradient.isfinite().all()
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("gamma", "expected"), [(0.0, [0.0, 2.0, -1.0, 0.0]), (0.5, [0.0, 1.5, -1.0, 0.0])])
def test_the_advantage_is_how_much_likelier_the_teacher_finds_a_token(gamma, expected):
    columns = {"teacher_logprobs": [9.0, -1.0, -4.0, 9.0], "old_logprobs": [5.0, -3.0, -3.0, 5.0]}
    batch = TensorDict({name: torch.tensor([values], dtype=F64) for name, values in columns.items()}, batch_size=[1])
    batch["loss_mask"] = KEEP
    scores, rewards = torch.ones(1, dtype=F64), torch.ones(1, 4, dtype=F64)
    assert teacher(scores, rewards, batch, gamma=gamma)["advantages"][0].tolist() == expected
