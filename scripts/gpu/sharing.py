"""Weights that another process of this machine reads from the memory of this one, as with transport=ipc."""

import asyncio
import hashlib
import time
from typing import Any

from gpu.checks import Check, FailedError, Found, Setting

TENSOR_BYTES = {True: 2**20, False: 2**27}  # by whether it runs on a CPU
TENSORS = 5
WAIT_S = 60.0


def checks() -> list[Check]:
    """The checks of this file."""
    return [Check("ipc", "weights to another process through shared memory", share, rank=70, seconds=240)]


def share(setting: Setting) -> Found:
    """A version goes to a second process by handles of memory; each of its tensors must arrive as it was written, and
    the memory must be free afterwards."""
    import torch
    from torch import multiprocessing

    from rft.rollout.server.weights.buckets import missing_tensors
    from rft.rollout.server.weights.store import WeightStore

    device = torch.device("cpu" if setting.cpu else "cuda")
    size = TENSOR_BYTES[setting.cpu] // 2
    tensors = [(f"layers.{number}.weight", torch.randn(size).bfloat16()) for number in range(TENSORS)]
    weights = WeightStore(setting.folder / "weights", None).write(1, iter(tensors))
    buckets = missing_tensors(weights, None)
    context = multiprocessing.get_context("spawn")
    calls, answers = context.Queue(), context.Queue()
    process = context.Process(target=work, args=(calls, answers, device.type), daemon=True)
    process.start()
    before = 0 if setting.cpu else torch.cuda.memory_allocated()
    arrived, seconds = asyncio.run(send(calls, answers, buckets, device))
    calls.put(None)
    process.join(10)
    if arrived != {name: stored.digest for name, stored in weights.tensors.items()}:
        raise FailedError("the second process reads other bytes than were written")
    if not setting.cpu and (left := torch.cuda.memory_allocated() - before):
        raise FailedError(f"{left} bytes of the GPU are still in use")
    total = sum(stored.nbytes for stored in weights.tensors.values())
    rate = total / 1e9 / seconds
    return Found(f"{total / 2**20:.0f} MiB in {len(buckets)} buckets at {rate:.2f} GB/s", {"gb_per_s": rate})


async def send(calls: Any, answers: Any, buckets: list[Any], device: Any) -> tuple[dict[str, str], float]:
    """Sends buckets as rank 0 does; returns the digests of what arrived, and the seconds."""
    from rft.remote.http_client import ServerClient
    from rft.rollout.server.weights.broadcast import BroadcastGroup

    async def call(method: str, **arguments: Any) -> Any:
        calls.put((method, arguments))
        answer = await asyncio.to_thread(answers.get, timeout=WAIT_S)
        if isinstance(answer, str):
            raise FailedError(f"the second process: {answer}")
        return answer

    client = ServerClient.at(0, "127.0.0.1:1")
    group = BroadcastGroup(client, [device.type], device, WAIT_S, deltas=False, shares_memory=True)
    try:
        await group.join(call("rft_join", **vars(group.rendezvous), timeout_s=WAIT_S), group.check_token)
        started = time.perf_counter()
        await call("rft_map", handles=group.share(max(bucket.size() for bucket in buckets)))
        arguments = {"backend": group.rendezvous.backend, "timeout_s": WAIT_S, "deltas": False}
        messages = (message for bucket in buckets for message in bucket.messages(None, group))
        abouts = [bucket.about() for bucket in buckets]
        found = await group.send(messages, call("rft_receive", buckets=abouts, **arguments))
        return dict(found), time.perf_counter() - started
    finally:
        group.close()


def work(calls: Any, answers: Any, device: str) -> None:
    """The second process: a worker whose model is the digests of the tensors."""
    import torch

    from rft.rollout.server.remote.rft_receiver import Receiver

    class Worker(Receiver):
        def rft_load(self, **source: Any) -> Any:
            read = ((name, tensor.cpu().view(torch.uint8).numpy()) for name, tensor in source["weights_iterator"])
            return [(name, hashlib.sha256(values).hexdigest()) for name, values in read]

    worker = Worker()
    worker.rank, worker.device = 0, torch.device(device)
    while (call := calls.get()) is not None:
        method, arguments = call
        try:
            answers.put(getattr(worker, method)(**arguments))
        except RuntimeError as error:
            answers.put(str(error))
