"""Counts the bytes of tensors over time, by term: weights, gradients, activations and others.

Torch has `torch.distributed._tools.mem_tracker.MemTracker`. For updates of a small actor both find the same peak to the
byte (tests/modes/plan/test_memory_tracker.py). The plan does not use it for four measured reasons:

- It fails if a module is called a second time, so it cannot follow micro-batches, unless its statistics of modules are
  cleared before every forward.
- It knows parameters, gradients, optimizer state and activations of modules, and one peak of the whole block. The plan
  separates logits, gathered weights, the cache of the engine, the engine's copy of the weights, models beside the
  policy and the batch, and needs the peak of each stage.
- In inference mode, in which the engine samples, it does not see allocations inside operations: it counts 4,096 of the
  53,248 bytes of an attention.
- It takes six times as long (4.9 s against 0.9 s for two updates, 8.1 s against 2.1 s on tensors without numbers).

`FakeTensorMode` does not replace `SkipCompute` either: the forward reads masks and lengths, and raises
`DataDependentOutputException` as soon as they are fake.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey, _dispatch_has_kernel_for_dispatch_key
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rft.modes.plan.skip_compute import tensors_in
from rft.strategy.base import HOST
from rft.strategy.gather import to_local

COMPOSITE = "CompositeImplicitAutograd"
UNLABELLED = "activations"
GATHERED = "gathered"
LABELS = {
    "logits": "logits",
    "ema": "ema",
    "kv cache": "kv cache",
    "loading": "loading",
    "reading": f"loading{HOST}",
    "engine": "engine",
    "checkpoint": f"checkpoint{HOST}",
    "file": f"file{HOST}",
}  # of `record_function` in this package
COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of operations whose results are gathered tensors


def device_bytes(terms: Mapping[str, int]) -> int:
    """The bytes of the terms on the device."""
    return sum(size for term, size in terms.items() if not term.endswith(HOST))


def host_bytes(terms: Mapping[str, int]) -> int:
    """The bytes of the terms in host memory."""
    return sum(terms.values()) - device_bytes(terms)


@dataclass(eq=False)
class Block:
    """A storage: its bytes, and the term to which they count."""

    size: int
    term: str


class MemoryTracker(TorchDispatchMode):
    """Tracks the storages of all tensors that operations return: when they are made, resized and freed.

    A storage counts for the term of the innermost `torch.profiler.record_function` block with a known label in which it
    was made, for `activations` outside of such blocks, or for the term that `assign` gives it later.

    Args:
        labels: further labels, or prefixes of labels, and their terms.
    """

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._labels = {**LABELS, **(labels or {})}
        self._active: list[str | None] = []  # the term of each `record_function` block that is open
        self._blocks: dict[int, Block] = {}  # storages that exist, by address
        self._events: list[tuple[Block, int]] = []  # a block and the change of its size
        self._stages: list[tuple[str, int, int]] = []  # name, first event, end of its events

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Tracks the block."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._blocks:
                self._resize(storage)

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]  # no dispatch mode sees it
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Names the block for `peaks`. Several blocks may have the same name."""
        start = len(self._events)
        yield
        self._stages.append((name, start, len(self._events)))

    def assign(self, term: str, tensors: Iterable[Tensor]) -> None:
        """Counts tensors for a term, from their creation on; those made under a label of host memory stay there."""
        for tensor in tensors:
            local = to_local(tensor)
            self._track(local)
            block = self._blocks[local.untyped_storage()._cdata]
            if not block.term.endswith(HOST):
                block.term = term

    def peaks(self) -> dict[str, dict[str, int]]:
        """Bytes of every term in each stage: when the device holds most, and of terms of host memory the most."""
        levels = self._levels(lambda term: not term.endswith(HOST))
        fullest: dict[str, int] = {}
        for name, start, end in self._stages:
            top = max(range(start, end + 1), key=lambda event: levels[event])
            if name not in fullest or levels[top] > levels[fullest[name]]:
                fullest[name] = top
        sums, peaks, done = dict[str, int](), dict[str, dict[str, int]](), 0
        for name, top in sorted(fullest.items(), key=lambda item: item[1]):
            for block, change in self._events[done:top]:
                sums[block.term] = sums.get(block.term, 0) + change
            peaks[name], done = dict(sums), top
        for host in {block.term for block, _ in self._events if block.term.endswith(HOST)}:
            levels = self._levels(host.__eq__)
            for name in fullest:
                peaks[name][host] = max(
                    max(levels[start : end + 1]) for stage, start, end in self._stages if stage == name
                )
        return {name: peaks[name] for name in fullest}

    def _levels(self, counts: Callable[[str], bool]) -> list[int]:
        """Bytes of the terms that count, before the first event and after each."""
        changes = (change if counts(block.term) else 0 for block, change in self._events)
        return list(accumulate(changes, initial=0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a subclass wraps tensors, which are dispatched one by one
        if func is torch.ops.profiler._record_function_enter_new.default:
            self._active.append(self._term(args[0]))
        elif func is torch.ops.profiler._record_function_exit._RecordFunction:
            self._active.pop()
        elif torch.is_inference_mode_enabled() and _dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):
            with self:  # in inference mode composite operations are not decomposed before dispatch
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
                self._track(tensor, GATHERED if func.namespace in COLLECTIVES else None)
        return result

    def _term(self, label: str) -> str | None:
        return next((term for known, term in self._labels.items() if label.startswith(known)), None)

    def _track(self, tensor: Tensor, term: str | None = None) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            active = next((label for label in reversed(self._active) if label is not None), UNLABELLED)
            block = Block(storage.nbytes(), term or active)
            self._blocks[storage._cdata] = block
            self._events.append((block, block.size))
            weakref.finalize(storage, self._free, storage._cdata).atexit = False
        else:
            self._resize(storage)

    def _resize(self, storage: torch.UntypedStorage) -> None:
        block, size = self._blocks[storage._cdata], storage.nbytes()
        if size != block.size:
            self._events.append((block, size - block.size))
            block.size = size

    def _free(self, address: int) -> None:
        block = self._blocks.pop(address)
        self._events.append((block, -block.size))
