"""Tensors without numbers: they have shapes, types and storages of the right size, and what runs on them is skipped.

So a step of a large model goes through its real code in seconds, on any machine: what it allocates and frees, and when,
can be watched, while no number is read or written. A hollow tensor is an ordinary tensor whose memory is reserved and
never touched. Whatever is computed from one, and whatever it is written into, is hollow too; all other tensors, such as
token ids and masks, are real.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
META = torch.device("meta")
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
# What touches no number although its schema does not say so.
RESHAPING = (aten._unsafe_view.default, aten.resize_.default, aten.set_.source_Storage_storage_offset)
UNSTATED = ("c10d", "fsdp")  # namespaces whose schemas do not say what is written
ANSWERS = {aten._local_scalar_dense.default: 1, aten.allclose.default: True, aten.equal.default: True}


class Like(NamedTuple):
    """A tensor that an operation returns: a new one, or a view of its n-th tensor."""

    of: int | None
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SkipCompute(TorchDispatchMode):
    """Skips what runs on hollow tensors, and makes their results.

    Where a program asks for a number of a hollow tensor it is 1, or true: masks are full, and everything is finite.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()
        self._creating = False
        self._known: dict[Any, Any] = {}  # what operations return, by what they are given

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
        tensors = list(tensors_in((args, *kwargs.values())))
        if FakeTensor in types or any(tensor.is_meta for tensor in tensors) or kwargs.get("device") == META:
            return func(*args, **kwargs)
        if any(_address(tensor) in self._storages for tensor in tensors):
            return self._skip(func, args, kwargs, tensors)
        if self._creating and not tensors and "device" in {argument.name for argument in func._schema.arguments}:
            shape = func(*args, **{**kwargs, "device": META})
            if shape.is_floating_point():
                return self._follow(_like(shape, {}), [])
        return func(*args, **kwargs)

    def _skip(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
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
        for tensor in tensors if func.namespace in UNSTATED else tensors_in(tuple(written.values())):
            self._mark(tensor)
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
        tensors = list(tensors_in((args, *kwargs.values())))
        addresses = [_address(tensor) for tensor in tensors]
        numbers = {address: addresses.index(address) for address in addresses}

        key = (func, changed((args, *kwargs.items()), lambda tensor: _like(tensor, numbers), tuple))
        if key not in self._known or func.namespace in UNSTATED:
            metas: dict[int, Any] = {}

            def shape_of(tensor: Tensor) -> Tensor:
                address = _address(tensor)
                if address not in metas:
                    size = tensor.untyped_storage().nbytes()
                    metas[address] = torch.empty(size, dtype=torch.uint8, device=META).untyped_storage()
                place = (tensor.storage_offset(), tensor.shape, tensor.stride())
                return torch.empty(0, dtype=tensor.dtype, device=META).set_(metas[address], *place)

            options = {name: changed(value, shape_of) for name, value in kwargs.items()}
            if "device" in kwargs:
                options["device"] = META
            shapes = func(*changed(args, shape_of), **options)
            owners = {storage._cdata: numbers[address] for address, storage in metas.items()}
            self._known[key] = changed(shapes, lambda shape: _like(shape, owners))
        return self._follow(self._known[key], tensors)

    def _follow(self, like: Any, tensors: list[Tensor]) -> Any:
        """The tensors that were described."""
        if isinstance(like, Like):
            if like.of is not None:
                return tensors[like.of].as_strided(like.shape, like.stride, like.offset)
            tensor = torch.empty_strided(like.shape, like.stride, dtype=like.dtype)
            self._mark(tensor)
            return tensor
        return type(like)(self._follow(part, tensors) for part in like) if isinstance(like, list | tuple) else like

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices without masks: the places that they choose; a hollow one chooses all."""
        places: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
            else:
                places += (torch.ones_like(index) if _address(index) in self._storages else index).nonzero().unbind(1)
        return places

    def _mark(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            weakref.finalize(storage, self._storages.discard, storage._cdata).atexit = False


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an operation's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def changed(value: Any, change: Callable[[Tensor], Any], kind: type | None = None) -> Any:
    """Arguments or results with something in place of every tensor; lists become what is asked for."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return (kind or type(value))(changed(part, change, kind) for part in value)
    return value


def _like(tensor: Tensor, numbers: dict[int, int]) -> Like:
    of = numbers.get(_address(tensor))
    return Like(of, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
