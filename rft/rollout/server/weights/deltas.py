"""The elements of a tensor that differ from those of the version before."""

import torch
from torch import Tensor

from rft.rollout.server.remote.rft_receiver import WHOLE

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sparse_delta(new: Tensor, old: Tensor) -> tuple[Tensor, ...]:
    """Positions (n,) int32 and new values (n,) of the elements that differ in any bit; or all of `new`, if smaller."""
    new_bits, old_bits = (tensor.view(-1).view(INTEGERS[new.itemsize]) for tensor in (new, old))
    places = (new_bits != old_bits).nonzero()[:, 0]  # (n,)
    if new.numel() >= 2**31 or len(places) * (4 + new.itemsize) >= new.nbytes:
        return (new,)
    return places.int(), new.view(-1)[places]


def changed_elements(delta: tuple[Tensor, ...]) -> int:
    """The number of elements of a result of `sparse_delta`; `WHOLE` for all of them."""
    return len(delta[0]) if len(delta) > 1 else WHOLE
