"""Tensors without numbers: they have shapes, types and storages of the right size, and what runs on them is skipped.

So a step of a large model goes through its real code in seconds, on any machine: what it allocates and frees, and when,
can be watched, while no number is read or written. A hollow tensor is an ordinary tensor whose memory is reserved and
never touched. Whatever is computed from one, and whatever it is written into, is hollow too; all other tensors, such as
token ids and masks, are real.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
META = torch.device("meta")
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
RESHAPING = (aten._unsafe_view.default, aten.resize_.default)  # they touch no number, which their schemas do not say
UNSTATED = ("c10d", "fsdp")  # namespaces whose schemas do not say what is written
ANSWERS = {aten._local_scalar_dense.default: 1, aten.allclose.default: True, aten.equal.default: True}


class Hollow(TorchDispatchMode):
    """Skips what runs on hollow tensors, and makes their results.

    Where a program asks for a number of a hollow tensor it is 1, or true: masks are full, and everything is finite.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()
        self._creating = False

    @contextmanager
    def creating(self) -> Iterator[None]:
        """New floating-point tensors of the block are hollow, such as the weights of a model."""
        self._creating = True
        try:
            yield
        finally:
            self._creating = False

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that hollow ones were written into are real again, with the numbers of before."""
        for tensor in tensors:
            self._storages.discard(_address(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a tensor that is made of tensors, which come here one by one
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if FakeTensor in types or any(tensor.is_meta for tensor in tensors) or kwargs.get("device") == META:
            return func(*args, **kwargs)
        if any(_address(tensor) in self._storages for tensor in tensors):
            return self._skip(func, args, kwargs)
        if self._creating and not tensors and "device" in {argument.name for argument in func._schema.arguments}:
            shape = func(*args, **{**kwargs, "device": META})
            if shape.is_floating_point():
                return self._make(shape)
        return func(*args, **kwargs)

    def _skip(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        schema = func._schema
        if func in ANSWERS:
            return ANSWERS[func]
        if func is aten.nonzero.default:
            return torch.ones(args[0].shape).nonzero()
        stated = [returned.alias_info for returned in schema.returns]
        if func in RESHAPING or any(alias is not None and not alias.is_write for alias in stated):
            return func(*args, **kwargs)  # a view
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written = {
            frozenset(argument.alias_info.before_set): given[argument.name]
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given
        }
        for leaf in tree_leaves((args, kwargs) if func.namespace in UNSTATED else list(written.values())):
            if isinstance(leaf, Tensor):
                self._mark(leaf)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        if all(alias is not None for alias in stated):  # in place, or into `out`
            results = tuple(written[frozenset(alias.before_set)] for alias in stated)
            return results[0] if len(results) == 1 else results or None
        if func in INDEXED:
            args = (args[0], self._places(args[1]), *args[2:])
        return self._results(func, args, kwargs)

    def _results(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Hollow tensors of the shapes that an operation returns; those that share memory with its inputs still do."""
        storages: dict[int, Any] = {}
        owners: dict[int, Tensor] = {}

        def shape_of(tensor: Tensor) -> Tensor:
            address, size = _address(tensor), tensor.untyped_storage().nbytes()
            if address not in storages:
                storages[address] = torch.empty(size, dtype=torch.uint8, device=META).untyped_storage()
                owners[storages[address]._cdata] = tensor
            place = (tensor.storage_offset(), tensor.shape, tensor.stride())
            return torch.empty(0, dtype=tensor.dtype, device=META).set_(storages[address], *place)

        def filled(shape: Tensor) -> Tensor:
            owner = owners.get(_address(shape))
            if owner is None:
                return self._make(shape)
            return owner.as_strided(shape.shape, shape.stride(), shape.storage_offset())

        shapes = tree_map_only(Tensor, shape_of, (tuple(args), kwargs))
        if "device" in kwargs:
            shapes[1]["device"] = META
        return tree_map_only(Tensor, filled, func(*shapes[0], **shapes[1]))

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices without masks: the places that they choose; a hollow one chooses all."""
        places: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
            else:
                places += (torch.ones_like(index) if _address(index) in self._storages else index).nonzero().unbind(1)
        return places

    def _make(self, shape: Tensor) -> Tensor:
        tensor = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        self._mark(tensor)
        return tensor

    def _mark(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            weakref.finalize(storage, self._storages.discard, storage._cdata).atexit = False


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
