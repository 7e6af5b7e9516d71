"""Finds operations for which the host would wait for a GPU: their results decide a size or a number on the host."""

import traceback
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rft
from rft.actor.actor import Actor

aten = torch.ops.aten
READ = {
    aten._local_scalar_dense.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.equal.default,
    aten.masked_scatter_backward.default,  # calls the next one, which no mode sees
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
HERE = str(Path(rft.__file__).parent)


class HostWaits(TorchDispatchMode):
    """Adds each such operation, with the line of rft that calls it, to `found`."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = func in INDEXED and any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1])
        if func in READ or masks:
            frame = [frame for frame in traceback.extract_stack() if frame.filename.startswith(HERE)][-1]
            self.found.append(f"{func} at {Path(frame.filename).name}: {frame.line}")
        return func(*args, **(kwargs or {}))


@contextmanager
def micro_batches_watched(monkeypatch):
    """The list of host waits in the forwards and the micro-steps of all actors in the block."""
    found: list[str] = []

    def watched(function):
        def watching(*arguments):
            with HostWaits(found):
                return function(*arguments)

        return watching

    with monkeypatch.context() as patch:
        for name in ("_forward", "_micro_step"):
            patch.setattr(Actor, name, watched(getattr(Actor, name)))
        yield found
