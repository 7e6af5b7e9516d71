"""Draws the weights of a new model one tensor at a time, with the numbers of a model that is drawn whole.

`from_config` of transformers draws all weights from one generator, in an order that the classes of a model decide:
torch's layers draw when they are made, and the model draws over that. Here this code runs as it is, on tensors without
memory. The operations that write into them are recorded, each with the state of the generator before it. When the
shards of the model have memory, the operations of one tensor after another are repeated. torchdistX calls this deferred
initialization.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rft.actor.loading.stored import LazyTensor

aten = torch.ops.aten
META, CPU = torch.device("meta"), torch.device("cpu")
OVERWRITING = (aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.copy_.default)
PROPERTIES = {Tensor.is_meta.__get__: False, Tensor.device.__get__: CPU}  # type: ignore[attr-defined]


class NotRecordedError(Exception):
    """What an operation does to tensors without memory is not recorded: the model has to be drawn whole."""


class Operation(NamedTuple):
    """An operation that makes a tensor, or writes into one.

    Attributes:
        run: repeats it; takes the tensor, unless it makes it.
        target: the tensor, on the meta device.
        state: of the generator before it; None if it does not draw.
        generator: that it draws from.
    """

    run: Callable[..., Any]
    target: Tensor
    state: Tensor | None
    generator: torch.Generator

    def repeat(self, *target: Tensor) -> Any:
        """Runs it with the state of then; that of now stays."""
        if self.state is None:
            return self.run(*target)
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            return self.run(*target)
        finally:
            self.generator.set_state(now)


class Drawing(TorchDispatchMode):
    """In the block, new tensors have no memory, and the generators move on as if they had.

    An operation that reads such a tensor gets its numbers, and what it returns has memory; so has a copy of it that is
    written into another tensor.

    Raises:
        NotRecordedError: an operation writes elsewhere than into its first argument, or the data of a tensor are
            replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self._as_if_real = AsIfReal()
        self._operations: dict[
            int, list[Operation]
        ] = {}  # by the address of the storage, which their targets keep alive
        self._weights: dict[str, LazyTensor] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        self._as_if_real.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._as_if_real.__exit__(*error)
        super().__exit__(*error)

    def keep(self, model: nn.Module) -> None:
        """Remembers the parameters of a model that was made in the block, and computes its buffers."""
        for buffer in model.buffers():
            if self._has(buffer):
                torch.utils.swap_tensors(buffer, self.draw(buffer))
        for name, parameter in model.named_parameters():
            if self._has(parameter):
                self._weights[name] = self._lazy(parameter.detach())

    def items(self) -> Iterator[tuple[str, LazyTensor]]:
        """Names of the parameters, and tensors that are drawn where they are indexed."""
        yield from self._weights.items()

    def _lazy(self, tensor: Tensor) -> LazyTensor:
        return LazyTensor(lambda region: self.draw(tensor)[region])

    @torch.no_grad()
    def draw(self, tensor: Tensor) -> Tensor:
        """The numbers of a tensor without memory, on the CPU."""
        create, *writes = self._operations[tensor.untyped_storage()._cdata]
        storage = create.repeat().untyped_storage()
        for write in writes:
            write.repeat(_part(storage, write.target))
        return _part(storage, tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors and "device" in {argument.name for argument in func._schema.arguments}:
            return self._create(func, args, kwargs)
        if func.is_view or not any(map(self._has, tensors)):
            return func(*args, **kwargs)
        written = list(filter(self._has, _written(func, args, kwargs)))
        if not written:
            args, kwargs = tree_map_only(Tensor, self._real, (args, kwargs))
            return func(*args, **kwargs)
        if len(written) > 1 or written[0] is not args[0]:
            raise NotRecordedError(str(func))
        return self._write(func, args, kwargs)

    def _create(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        made: Tensor = func(*args, **{**kwargs, "device": META})
        operation = _operation(func, made, args, {**kwargs, "device": CPU, "dtype": made.dtype})
        if operation.state is not None:
            operation.run()
        self._operations[made.untyped_storage()._cdata] = [operation]
        return made

    def _write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        target, storage = args[0], args[0].untyped_storage()
        rest, options = tree_map_only(Tensor, lambda tensor: self._real(tensor).clone(), (args[1:], kwargs))
        operation = _operation(func, target.detach(), rest, options)
        if operation.state is not None:
            operation.run(_part(torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage(), target))
        if func in OVERWRITING and target.nbytes == storage.nbytes():
            del self._operations[storage._cdata][1:]
        self._operations[storage._cdata].append(operation)
        return target

    def _has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._operations

    def _real(self, tensor: Tensor) -> Tensor:
        return self.draw(tensor) if self._has(tensor) else tensor


class AsIfReal(TorchFunctionMode):
    """In the block, tensors on the meta device report the device CPU: some code draws nothing on the meta device.

    Raises:
        NotRecordedError: the data of a tensor are replaced.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PROPERTIES:
            return PROPERTIES[func]
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise NotRecordedError("the data of a tensor are replaced")
        return func(*args, **(kwargs or {}))


def _operation(func: Any, target: Tensor, args: Any, kwargs: dict[str, Any]) -> Operation:
    generator = kwargs.get("generator") or torch.default_generator
    state = generator.get_state() if torch.Tag.nondeterministic_seeded in func.tags else None
    return Operation(lambda *first: func(*first, *args, **kwargs), target, state, generator)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes into."""
    arguments = func._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    names = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    return [leaf for leaf in tree_leaves([given.get(name) for name in names]) if isinstance(leaf, Tensor)]


def _part(storage: UntypedStorage, outline: Tensor) -> Tensor:
    """The part of a storage that a tensor on the meta device has of its own."""
    place = (outline.storage_offset(), outline.shape, outline.stride())
    return torch.empty(0, dtype=outline.dtype).set_(storage, *place)
