"""Parameters that stand in for those of a model: numbers without memory, and the model as before afterwards."""

import torch
from torch import nn

from rft.actor.loading.stand_ins import random_numbers, stand_ins, zeros


def test_parameters_are_the_same_objects_afterwards():
    model = nn.Sequential(nn.Linear(3, 4, device="meta"), nn.Linear(4, 2))
    model[1].weight.requires_grad_(False)
    before = dict(model.named_parameters())
    with stand_ins(model, zeros):
        assert not any(parameter.is_meta for parameter in model.parameters())
        assert not model(torch.ones(1, 3)).any()
        assert [p.requires_grad for p in model.parameters()] == [True, True, False, True]
        model[0].weight.requires_grad_(False)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert [p.requires_grad for p in model.parameters()] == [False, True, False, True]


def test_zeros_take_no_memory():
    assert zeros(torch.empty(30, 40, device="meta")).untyped_storage().nbytes() == 4


def test_numbers_are_random_and_shared():
    make = random_numbers()
    first, second = (make(torch.empty(200, 100, device="meta")) for _ in range(2))
    assert first.untyped_storage().nbytes() == 4 * 300
    assert torch.equal(first[1:, :-1], first[:-1, 1:]) and torch.equal(first[1], second[0])
    assert abs(float(first.std()) - 0.1) < 0.02  # 1 / sqrt(100)
    norm = make(torch.empty(500, device="meta"))
    assert abs(float(norm.mean()) - 1) < 0.02 and norm.std() < 0.2
    assert torch.equal(random_numbers()(first), first)


def test_experts_are_one_matrix():
    make = random_numbers()
    one, two = (make(torch.empty(count, 6, 5, device="meta")) for count in (4, 3))
    assert one.shape == (4, 6, 5) and one[0].is_contiguous() and one.untyped_storage().nbytes() == 4 * 30
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    assert torch.linalg.matrix_rank(one[0]) == 5


def test_large_matrices_get_more_numbers():
    assert random_numbers()(torch.empty(2**16, 3, device="meta"))[-1].std() > 0
