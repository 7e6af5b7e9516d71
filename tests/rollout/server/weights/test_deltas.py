import torch

from rft.rollout.server.weights.deltas import sparse_delta


def test_a_tensor_of_which_much_has_changed_travels_whole():
    old = torch.zeros(24)
    for count in (0, 11):
        assert len(sparse_delta(torch.ones(24) * (torch.arange(24) < count), old)[0]) == count
    [whole] = sparse_delta(torch.ones(24) * (torch.arange(24) < 12), old)
    assert whole.sum() == 12 and sparse_delta(torch.tensor(2.0), torch.tensor(3.0)) == (torch.tensor(2.0),)
