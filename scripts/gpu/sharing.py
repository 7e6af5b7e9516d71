"""Weights that another process of this machine gets: from the memory of this one, as with transport=ipc, or by vLLM's
own weight transfer."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from gpu.checks import Check, FailedError, Found, Setting, TooFewGPUsError

TENSOR_BYTES = {True: 2**20, False: 2**27}  # by whether it runs on a CPU
TENSORS = 5
WAIT_S = 60.0
URL = "http://127.0.0.1:1"  # of the second process, which has a queue in place of a server


def checks() -> list[Check]:
    """The checks of this file."""
    return [
        Check("ipc", "weights to another process through shared memory", share, rank=62, seconds=20),
        Check("vllm_transfer", "weights by vLLM's own transfer", transfer, 91, 60, cuda=True, package="vllm"),
    ]


def share(setting: Setting) -> Found:
    """A version goes to a second process by handles of memory; each of its tensors must arrive as it was written, and
    the memory must be free afterwards."""
    import torch

    device = torch.device("cpu" if setting.cpu else "cuda")
    before = 0 if setting.cpu else torch.cuda.memory_allocated()
    found = deliver(setting, partial(work, device=device.type), partial(send, device=device))
    if not setting.cpu and (left := torch.cuda.memory_allocated() - before):
        raise FailedError(f"{left} bytes of the GPU are still in use")
    return found


def transfer(setting: Setting) -> Found:
    """A version goes by NCCL to a second process, in which vLLM's worker end receives it on a second GPU."""
    import torch

    if torch.cuda.device_count() < 2:
        raise TooFewGPUsError("two: NCCL refuses two processes on one GPU")
    return deliver(setting, receive, send_transfer)


def deliver(setting: Setting, target: Callable[[Any, Any], None], send: Callable[..., Any]) -> Found:
    """Starts a second process and sends it a version, of which each tensor must arrive as it was written.

    Args:
        target: runs in the second process with two queues: for calls, and for their answers.
        send: sends buckets with these queues; returns the digests of what arrived, and the seconds.
    """
    import torch
    from torch import multiprocessing

    from rft.rollout.server.weights.buckets import missing_tensors
    from rft.rollout.server.weights.store import WeightStore

    size = TENSOR_BYTES[setting.cpu] // 2
    tensors = [(f"layers.{number}.weight", torch.randn(size).bfloat16()) for number in range(TENSORS)]
    weights = WeightStore(setting.folder / "weights", None).write(1, iter(tensors))
    buckets = missing_tensors(weights, None)
    context = multiprocessing.get_context("spawn")
    calls, answers = context.Queue(), context.Queue()
    process = context.Process(target=target, args=(calls, answers), daemon=True)
    process.start()
    arrived, seconds = asyncio.run(send(calls, answers, buckets))
    calls.put(None)
    process.join(10)
    if arrived != {name: stored.digest for name, stored in weights.tensors.items()}:
        raise FailedError("the second process reads other bytes than were written")
    total = sum(stored.nbytes for stored in weights.tensors.values())
    rate = total / 1e9 / seconds
    return Found(f"{total / 2**20:.0f} MiB in {len(buckets)} buckets at {rate:.2f} GB/s", {"gb_per_s": rate})


async def asked(calls: Any, answers: Any, *call: Any) -> Any:
    """What the second process answers to a call."""
    calls.put(call)
    answer = await asyncio.to_thread(answers.get, timeout=WAIT_S)
    if isinstance(answer, str):
        raise FailedError(f"the second process: {answer}")
    return answer


async def send(calls: Any, answers: Any, buckets: list[Any], device: Any) -> tuple[dict[str, str], float]:
    """Sends buckets as rank 0 does; returns the digests of what arrived, and the seconds."""
    from rft.remote.http_client import ServerClient
    from rft.rollout.server.weights.vllm import VLLMSharedMemory

    class Client(ServerClient):
        answer: Any = None  # the last one

        async def post(self, path: str, body: Any = None) -> Any:
            self.answer = await asked(calls, answers, body["method"], body["kwargs"])
            return {"results": [self.answer]}

    client = Client("the second process", URL)
    transport = VLLMSharedMemory(client, [device.type], device, WAIT_S)
    try:
        await transport.open()
        started = time.perf_counter()
        await transport.send_buckets(buckets, buckets[0].weights)
        return dict(client.answer), time.perf_counter() - started
    finally:
        transport.close()


async def send_transfer(calls: Any, answers: Any, buckets: list[Any]) -> tuple[dict[str, str], float]:
    """Sends buckets by vLLM's own transfer; returns the digests of what arrived, and the seconds."""
    import torch

    from rft.remote.http_client import ServerClient
    from rft.rollout.server.weights.vllm_transfer import VLLMTransfer

    class Client(ServerClient):
        async def post(self, path: str, body: Any = None) -> Any:
            return await asked(calls, answers, path, body)

    client = Client("the second process", URL)
    transport = VLLMTransfer(client, ["cuda"], torch.device("cuda"), WAIT_S)
    try:
        await transport.open()
        started = time.perf_counter()
        await transport.send_buckets(buckets, None)
        seconds = time.perf_counter() - started
        return dict(await client.post("digests")), seconds
    finally:
        transport.close()


def digests(tensors: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """The SHA-256 of the bytes of tensors, by their names."""
    import torch

    read = ((name, tensor.cpu().view(torch.uint8).numpy()) for name, tensor in tensors)
    return [(name, hashlib.sha256(values).hexdigest()) for name, values in read]


def receive(calls: Any, answers: Any) -> None:
    """The second process: the end of vLLM's transfer in a worker, whose model is the digests of the tensors."""
    from types import SimpleNamespace

    import torch
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    torch.cuda.set_device(1)
    found: list[tuple[str, str]] = []
    model = SimpleNamespace(load_weights=lambda tensors: found.extend(digests(tensors)))
    place = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    about: Any = SimpleNamespace(parallel_config=place, model_config=None)
    engine = NCCLWeightTransferEngine(WeightTransferConfig("nccl"), about, torch.device("cuda", 1), model)
    while (call := calls.get()) is not None:
        path, body = call
        try:
            if path == "/init_weight_transfer_engine":
                engine.init_transfer_engine(engine.parse_init_info(body["init_info"]))
            elif path == "/update_weights":
                engine.update_weights(body["update_info"])
            answers.put(found)
        except (RuntimeError, ValueError) as error:
            answers.put(str(error))


def work(calls: Any, answers: Any, device: str) -> None:
    """The second process: a worker whose model is the digests of the tensors."""
    import torch

    from rft.rollout.server.remote.rft_receiver import Receiver

    class Worker(Receiver):
        def rft_load(self, **source: Any) -> Any:
            return digests(source["weights_iterator"])

    worker = Worker()
    worker.rank, worker.device = 0, torch.device(device)
    while (call := calls.get()) is not None:
        method, arguments = call
        try:
            answers.put(getattr(worker, method)(**arguments))
        except RuntimeError as error:
            answers.put(str(error))
