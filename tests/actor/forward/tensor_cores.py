"""The product of 16-bit matrices with a sum in float32, which torch has on a GPU alone."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class TensorCores(TorchDispatchMode):
    """Computes the product that torch has on a GPU alone, and records the products of matrices.

    Attributes:
        sixteen: dtypes of the factors of each product of 16-bit matrices.
        thirty_two: the precision of each product of float32 matrices.
    """

    def __init__(self):
        super().__init__()
        self.sixteen, self.thirty_two = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.dtype_out:
            self.sixteen.append((args[0].dtype, args[1].dtype, args[2]))
            return kwargs["out"].copy_(args[0].double() @ args[1].double())
        if func in (torch.ops.aten.mm.out, torch.ops.aten.mm.default, torch.ops.aten.addmm.out):
            self.thirty_two.append(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))
