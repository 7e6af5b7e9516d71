"""Runs code on placeholders: tensors with shapes, dtypes and storages of the right size without numbers.

A step of a large model runs its real code in seconds, on any machine, and the memory that it allocates and frees can be
tracked. A placeholder is an ordinary tensor whose memory is reserved and never touched. Results computed from a
placeholder, and tensors that a placeholder is written into, are placeholders. All other tensors, such as token ids and
masks, are real. Torch's `FakeTensorMode` makes all tensors fake; see `rft.modes.plan.memory_tracker`.
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
# operations that read no number, although their schemas do not state it
RESHAPING = (aten._unsafe_view.default, aten.resize_.default, aten.set_.source_Storage_storage_offset)
UNSTATED = ("c10d", "fsdp")  # namespaces of operations whose schemas do not state what they write
SCALARS = {aten._local_scalar_dense.default: 1, aten.allclose.default: True, aten.equal.default: True}


class ResultSpec(NamedTuple):
    """A tensor that an operation returns: a new one, or a view of its n-th tensor argument."""

    argument: int | None
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SkipCompute(TorchDispatchMode):
    """Skips operations on placeholders and returns placeholders.

    A number read from a placeholder is 1 or True: masks are full, and everything is finite. `bincount` counts as many
    in each bin: tokens go evenly to the experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()
        self._creating = False
        self._known: dict[Any, Any] = {}  # results of operations, by their arguments

    @contextmanager
    def creating(self) -> Iterator[None]:
        """New floating-point tensors of the block, such as the weights of a model, are placeholders."""
        self._creating = True
        try:
            yield
        finally:
            self._creating = False

    def materialize(self, tensors: Iterable[Tensor]) -> None:
        """Makes tensors real again; they hold the numbers from before a placeholder was written into them."""
        for tensor in tensors:
            self._storages.discard(_address(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a subclass wraps tensors, which are dispatched one by one
        tensors = list(tensors_in((args, *kwargs.values())))
        if FakeTensor in types or any(tensor.is_meta for tensor in tensors) or kwargs.get("device") == META:
            return func(*args, **kwargs)
        if any(_address(tensor) in self._storages for tensor in tensors):
            return self._skip(func, args, kwargs, tensors)
        if self._creating and not tensors and "device" in {argument.name for argument in func._schema.arguments}:
            result = func(*args, **{**kwargs, "device": META})
            if result.is_floating_point():
                return self._make(_spec(result, {}), [])
        return func(*args, **kwargs)

    def _skip(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        schema = func._schema
        if func in SCALARS:
            return SCALARS[func]
        if func is aten.nonzero.default:
            return torch.ones(args[0].shape).nonzero()
        stated = [returned.alias_info for returned in schema.returns]
        if func in RESHAPING or any(alias is not None and not alias.is_write for alias in stated):
            return func(*args, **kwargs)  # a view
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        if func is aten.bincount.default:
            return _even_counts(args[0].numel(), given["minlength"])
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
            args = (args[0], self._positions(args[1]), *args[2:])
        return self._results(func, args, kwargs)

    def _results(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The placeholders that an operation returns; results that share memory with arguments still do."""
        tensors = list(tensors_in((args, *kwargs.values())))
        addresses = [_address(tensor) for tensor in tensors]
        numbers = {address: addresses.index(address) for address in addresses}

        key = (func, map_tensors((args, *kwargs.items()), lambda tensor: _spec(tensor, numbers), tuple))
        if key not in self._known or func.namespace in UNSTATED:
            metas: dict[int, Any] = {}

            def shape_of(tensor: Tensor) -> Tensor:
                address = _address(tensor)
                if address not in metas:
                    size = tensor.untyped_storage().nbytes()
                    metas[address] = torch.empty(size, dtype=torch.uint8, device=META).untyped_storage()
                view = (tensor.storage_offset(), tensor.shape, tensor.stride())
                return torch.empty(0, dtype=tensor.dtype, device=META).set_(metas[address], *view)

            options = {name: map_tensors(value, shape_of) for name, value in kwargs.items()}
            if "device" in kwargs:
                options["device"] = META
            outline = grouped_outline if func is aten._grouped_mm.default else func
            shapes = outline(*map_tensors(args, shape_of), **options)
            owners = {storage._cdata: numbers[address] for address, storage in metas.items()}
            self._known[key] = map_tensors(shapes, lambda shape: _spec(shape, owners))
        return self._make(self._known[key], tensors)

    def _make(self, spec: Any, tensors: list[Tensor]) -> Any:
        """The tensors that specs describe."""
        if isinstance(spec, ResultSpec):
            if spec.argument is not None:
                return tensors[spec.argument].as_strided(spec.shape, spec.stride, spec.offset)
            tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
            self._mark(tensor)
            return tensor
        return type(spec)(self._make(part, tensors) for part in spec) if isinstance(spec, list | tuple) else spec

    def _positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices with masks replaced by the positions that they select; a placeholder selects all."""
        positions: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                positions.append(index)
            else:
                mask = torch.ones_like(index) if _address(index) in self._storages else index
                positions += mask.nonzero().unbind(1)
        return positions

    def _mark(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            weakref.finalize(storage, self._storages.discard, storage._cdata).atexit = False


def grouped_outline(first: Tensor, second: Tensor, offs: Tensor, *_: Any) -> Tensor:
    """The result of `_grouped_mm` on the meta device, where torch's own takes bfloat16 alone.

    Args:
        first: (n, A); for the gradient of the weights (A, n).
        second: (groups, A, B); for the gradient of the weights (n, B).
        offs: (groups,)
    """
    if second.dim() == 3:
        return first.new_empty(len(first), second.shape[2])
    return first.new_empty(len(offs), len(first), second.shape[1])


def _even_counts(total: int, bins: int) -> Tensor:
    return torch.arange(total, total + bins).div(bins, rounding_mode="floor")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an operation's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def map_tensors(value: Any, change: Callable[[Tensor], Any], kind: type | None = None) -> Any:
    """Arguments or results with every tensor replaced; lists and tuples become `kind`, if it is given."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return (kind or type(value))(map_tensors(part, change, kind) for part in value)
    return value


def _spec(tensor: Tensor, numbers: dict[int, int]) -> ResultSpec:
    argument = numbers.get(_address(tensor))
    return ResultSpec(argument, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
