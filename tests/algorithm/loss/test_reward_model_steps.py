"""The loss of a process reward model: numbers and gradients by hand."""

import math

import torch
from tensordict import TensorDict

from rft.algorithm.loss.reward_model import step_cross_entropy

F64 = torch.float64
KEEP = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0]], dtype=torch.bool)


def run(scores, labels):
    """Losses, their gradient by the score, and the statistics of three steps; nonsense stands everywhere else."""
    score = torch.full(KEEP.shape, 99.0, dtype=F64).masked_scatter(KEEP, torch.tensor(scores, dtype=F64))
    label = torch.full(KEEP.shape, 0.7, dtype=F64).masked_scatter(KEEP, torch.tensor(labels, dtype=F64))
    score.requires_grad_()
    losses, statistics = step_cross_entropy(
        score, TensorDict({"loss_mask": KEEP, "step_labels": label}, batch_size=[2])
    )
    (gradient,) = torch.autograd.grad(losses.sum(), score)
    columns = {"loss": losses.detach(), "gradient": gradient, **statistics}
    assert not any(column[~KEEP].any() for column in columns.values())
    return {name: column[KEEP].tolist() for name, column in columns.items()}


def test_the_loss_by_hand_with_a_soft_label():
    p = [1 / (1 + math.exp(-score)) for score in (0.8, 2.0, -0.3)]
    found = run([0.8, 2.0, -0.3], [1.0, 0.0, 0.25])
    losses = [-math.log(p[0]), -math.log(1 - p[1]), -0.25 * math.log(p[2]) - 0.75 * math.log(1 - p[2])]
    for name, expected in {
        "loss": losses,
        "gradient": [p[0] - 1, p[1], p[2] - 0.25],
        "steps/accuracy": [1.0, 0.0, 1.0],
        "steps/probability": p,
        "steps/label": [1.0, 0.0, 0.25],
    }.items():
        torch.testing.assert_close(found.pop(name), expected, rtol=1e-14, atol=1e-14)
    assert not found


def test_a_score_that_is_far_off_leaves_the_loss_finite():
    found = run([1e4, -1e4, 1e4], [1.0, 1.0, 0.0])
    assert found["loss"] == [0.0, 1e4, 1e4] and found["gradient"] == [0.0, -1.0, 1.0]
