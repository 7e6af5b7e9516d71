"""Counts the bytes that tensors hold, by what they are for."""

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey, _dispatch_has_kernel_for_dispatch_key
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rft.modes.plan.skip_compute import tensors_in

COMPOSITE = "CompositeImplicitAutograd"
REST = "activations"
# Code that allocates for something else, by its file.
FILES = {
    "torch/distributed/fsdp/": "gathered",
    "torch/distributed/_functional_collectives.py": "gathered",
    "rft/actor/logprobs.py": "logits",
    "rft/actor/optim/ema.py": "ema",
    "rft/rollout/engine/sampling.py": "logits",
    "rft/rollout/engine/kv_cache.py": "kv cache",
    "transformers/cache_utils.py": "kv cache",
}


@dataclass(eq=False)
class Block:
    """A storage: its bytes, and what they are for."""

    size: int
    term: str


class MemoryTracker(TorchDispatchMode):
    """Watches the storages of all tensors that operations return: how they come, grow, shrink and go."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, Block] = {}  # by address; those that are there
        self._events: list[tuple[Block, int]] = []  # a block, and by how much it has grown
        self._stages: list[tuple[str, int, int]] = []  # name, first event, behind the last event
        self._terms: dict[str, str | None] = {}  # by file

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watches what happens in the block."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._blocks:
                self._grow(storage)

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]  # no dispatch mode sees it
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Gives a name to what happens in the block; `peaks` speaks of it. Several blocks may have one name."""
        start = len(self._events)
        yield
        self._stages.append((name, start, len(self._events)))

    def call(self, term: str, tensors: Iterable[Tensor]) -> None:
        """Says what some tensors are for. It holds for all of their past."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._note(local)
            self._blocks[local.untyped_storage()._cdata].term = term

    def peaks(self) -> dict[str, dict[str, int]]:
        """The bytes of every term at the moment of each stage when all terms together were the most."""
        level, levels = 0, [0]
        for _, change in self._events:
            level += change
            levels.append(level)
        fullest: dict[str, int] = {}
        for name, start, end in self._stages:
            top = max(range(start, end + 1), key=lambda event: levels[event])
            if name not in fullest or levels[top] > levels[fullest[name]]:
                fullest[name] = top
        sums, found, done = dict[str, int](), dict[str, dict[str, int]](), 0
        for name, top in sorted(fullest.items(), key=lambda item: item[1]):
            for block, change in self._events[done:top]:
                sums[block.term] = sums.get(block.term, 0) + change
            found[name], done = dict(sums), top
        return {name: found[name] for name in fullest}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a tensor that is made of tensors, which come here one by one
        if torch.is_inference_mode_enabled() and _dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):
            with self:  # in this mode operations come whole that elsewhere come in parts
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            block = Block(storage.nbytes(), self._purpose())
            self._blocks[storage._cdata] = block
            self._events.append((block, block.size))
            weakref.finalize(storage, self._forget, storage._cdata).atexit = False
        else:
            self._grow(storage)

    def _grow(self, storage: torch.UntypedStorage) -> None:
        block, size = self._blocks[storage._cdata], storage.nbytes()
        if size != block.size:
            self._events.append((block, size - block.size))
            block.size = size

    def _forget(self, address: int) -> None:
        block = self._blocks.pop(address)
        self._events.append((block, -block.size))

    def _purpose(self) -> str:
        frame: Any = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in self._terms:
                self._terms[file] = next((term for part, term in FILES.items() if part in file), None)
            if self._terms[file] is not None:
                return str(self._terms[file])
            frame = frame.f_back
        return REST
