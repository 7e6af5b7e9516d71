"""torch.compile as the run uses it: one graph for all sizes."""

from collections.abc import Callable
from typing import Any

import torch

GRAPHS = 64  # of one function, at most; torch's own limit is 8


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function for tensors of any size; after the first call another size does not compile it again.

    Sizes of 0 and 1 have graphs of their own, and so have passes without gradients, other options, and weights of other
    shapes: several models of a run share the function of their blocks. Beyond the limit torch computes uncompiled.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    return torch.compile(function, dynamic=True)
