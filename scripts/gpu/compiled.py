"""strategy.compile=true: graphs and graph breaks of updates of several lengths, and the compiled log-probabilities."""

import gc
import importlib.util
import time
from typing import Any

from gpu.checks import Check, FailedError, Found, Setting
from gpu.speed import CPU_SCALE, LENGTHS, build

REPEATS = 3  # measured, the best counts
SIZES = {True: (64, 5000, 32), False: (8192, 151936, 1536)}  # tokens, vocabulary and hidden size; on a CPU, on a GPU
ERROR = {True: 1e-5, False: 1e-2}  # of the largest number; gradients are rounded to bfloat16 on a GPU


def checks() -> list[Check]:
    """The checks of this file."""
    title = "compiled updates of several lengths compile once, beside uncompiled ones, Qwen2.5-1.5B's shape"
    return [
        Check("compile:blocks", title, blocks, rank=44, seconds=400, cuda=True),
        Check("compile:logprobs", "compiled log-probabilities, beside uncompiled", logprobs, 45, 200, cuda=True),
    ]


def blocks(setting: Setting) -> Found:
    """Seconds of an update without and with strategy.compile; other lengths must not compile again."""
    from torch._dynamo.utils import counters

    length = LENGTHS["8k"] // (CPU_SCALE if setting.cpu else 1)
    numbers: dict[str, Any] = {}
    for flag in ("false", "true"):
        updates = build("sft", LENGTHS["8k"], setting, [f"strategy.compile={flag}"])
        started = time.perf_counter()
        updates.update()
        numbers[f"first_s_{flag}"] = time.perf_counter() - started
        seconds = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            updates.update()
            seconds.append(time.perf_counter() - started)
        numbers |= {f"seconds_{flag}": min(seconds), f"memory_gib_{flag}": updates.memory()}
        graphs = counters["stats"]["unique_graphs"]
        for other in (length // 2, length // 2 + 1, length // 3, length - 7):
            updates.update(other)
        del updates
        gc.collect()
    numbers |= {"graphs": graphs, "graphs_again": counters["stats"]["unique_graphs"] - graphs}
    if numbers["graphs_again"] or counters["graph_break"]:
        raise FailedError(
            f"{numbers['graphs_again']} graphs for other lengths; breaks: {dict(counters['graph_break'])}"
        )
    ratio, peak = numbers["seconds_true"] / numbers["seconds_false"], numbers["memory_gib_true"]
    return Found(
        f"{ratio:.2f} of the time after {numbers['first_s_true']:.0f} s, {graphs} graphs, {peak:.1f} GiB", numbers
    )


def logprobs(setting: Setting) -> Found:
    """Log-probabilities and entropy of the benchmark, forward and backward, uncompiled, compiled, and by Liger."""
    import torch
    from bench.logprob_side import WAYS, forget_peak, peak
    from torch._dynamo.utils import counters

    device, dtype = ("cpu", torch.float32) if setting.cpu else ("cuda", torch.bfloat16)
    tokens, vocabulary, size = SIZES[setting.cpu]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocabulary, size, generator=generator) / size**0.5).to(device, dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)

    def work(way: str, count: int = tokens) -> list[Any]:
        found, entropy = WAYS[way](hidden[:count], weight, targets[:count].clone(), True)  # a view is compiled again
        assert entropy is not None
        gradients = torch.autograd.grad(found.sum() + entropy.sum(), (hidden, weight))
        if device == "cuda":
            torch.cuda.synchronize()
        return [found.detach(), entropy.detach(), *gradients]

    numbers: dict[str, Any] = {}
    ways = ["rft", "rft_compiled"] + ["liger"] * (
        not setting.cpu and importlib.util.find_spec("liger_kernel") is not None
    )
    for way in ways:
        work(way)
        seconds, before = [], forget_peak(device)
        for _ in range(REPEATS):
            started = time.perf_counter()
            work(way)
            seconds.append(time.perf_counter() - started)
        numbers |= {f"seconds_{way}": min(seconds), f"memory_gib_{way}": (peak(device) - before) / 2**30}
    pairs = zip(work("rft_compiled"), work("rft"), strict=True)
    numbers["difference"] = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    graphs = counters["stats"]["unique_graphs"]
    for count in (tokens // 2, tokens // 2 + 1, tokens // 3):
        work("rft_compiled", count)
    numbers |= {"graphs": graphs, "graphs_again": counters["stats"]["unique_graphs"] - graphs}
    if numbers["graphs_again"] or not numbers["difference"] <= ERROR[setting.cpu]:
        raise FailedError(f"{numbers['graphs_again']} graphs for other lengths, difference {numbers['difference']:.1e}")
    parts = [f"{way}: {numbers[f'seconds_{way}']:.4f} s, {numbers[f'memory_gib_{way}']:.2f} GiB" for way in ways]
    return Found("; ".join([*parts, f"differs by {numbers['difference']:.1e}"]), numbers)
