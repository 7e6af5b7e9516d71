"""The schedule by hand, and what AdamW is given."""

import pytest
import torch

from tests.defaults import make_optimizer


def options(**changes):
    return make_optimizer(**{"lr": 0.1, "betas": [0.9, 0.95], "weight_decay": 0.3, "warmup_updates": 0} | changes)


@pytest.mark.parametrize(
    ("schedule", "warmup", "final", "updates", "expected"),
    [
        ("constant", 0, 0.0, 3, [1, 1, 1, 1]),
        ("constant", 4, 0.0, 9, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("linear", 0, 0.0, 4, [1, 0.75, 0.5, 0.25, 0, 0, 0]),
        ("linear", 2, 0.2, 6, [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", 0, 0.0, 4, [1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0, 0]),
        ("cosine", 1, 0.5, 3, [1, 1, 0.75, 0.5, 0.5]),
        ("linear", 5, 0.0, 5, [0.2, 0.4, 0.6, 0.8, 1, 1, 0]),  # no update is left to fall in
    ],
)
def test_factors_by_hand(schedule, warmup, final, updates, expected):
    made = options(schedule=schedule, warmup_updates=warmup, final_lr=final)
    assert [made.factor(update, updates) for update in range(len(expected))] == pytest.approx(expected, abs=1e-12)


def test_the_rate_of_an_update_is_that_of_its_number():
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    adamw, scheduler = options(schedule="linear", warmup_updates=2).build([weight], 4)
    rates = []
    for _ in range(4):
        rates.append(adamw.param_groups[0]["lr"])
        assert scheduler.get_last_lr()[0] == rates[-1]
        weight.grad = torch.ones(2, 2)
        adamw.step()
        scheduler.step()
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.05])


def test_only_matrices_decay_and_only_what_trains_is_taken():
    matrix, bias, frozen = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,), (3, 3)))
    frozen.requires_grad_(False)
    adamw, _ = options().build([matrix, bias, frozen], 1)
    found = {id(p): group for group in adamw.param_groups for p in group["params"]}
    assert set(found) == {id(matrix), id(bias)}
    assert (found[id(matrix)]["weight_decay"], found[id(bias)]["weight_decay"]) == (0.3, 0.0)
    assert all(group["betas"] == (0.9, 0.95) and group["eps"] == 1e-8 for group in adamw.param_groups)


def test_a_network_without_biases_has_one_group():
    adamw, _ = options().build([torch.nn.Parameter(torch.zeros(2, 2))], 1)
    assert len(adamw.param_groups) == 1
