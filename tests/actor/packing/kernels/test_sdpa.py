"""The mask of rows with a window or a prefix."""

import torch

from rft.actor.packing.kernels.sdpa import causal_window_mask


def test_who_sees_whom():
    assert causal_window_mask(3, 0, 9, torch.device("cpu")).long().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert causal_window_mask(2, 3, 9, torch.device("cpu")).long().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_window_mask(3, 1, 2, torch.device("cpu")).long().tolist() == [
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
