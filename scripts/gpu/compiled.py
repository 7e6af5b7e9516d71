"""Compiled blocks: graphs and graph breaks of updates of several lengths; and the compiled log-probabilities."""

import importlib.util
import time
from typing import Any

from gpu.checks import Check, FailedError, Found, Setting
from gpu.updates import described, shared_policy, timed, tokens_of, work_of

REPEATS = 2  # measured, the best counts
OTHERS = ("2k", "short")  # lengths that must not compile again
SIZES = {True: (64, 5000, 32), False: (8192, 151936, 1536)}  # tokens, vocabulary and hidden size; on a CPU, on a GPU
ERROR = {True: 1e-5, False: 1e-2}  # of the largest number; gradients are rounded to bfloat16 on a GPU


def checks() -> list[Check]:
    """The checks of this file."""
    title = "an update of SFT with compiled blocks, which compile once for all lengths, Qwen2.5-1.5B's shape, bfloat16"
    return [
        Check("compile:blocks", title, blocks, rank=40, seconds=75, cuda=True),
        Check("compile:logprobs", "compiled log-probabilities, beside uncompiled", logprobs, 78, 60, cuda=True),
    ]


def blocks(setting: Setting) -> Found:
    """Seconds of an update with compiled blocks, as strategy.compile makes them; no other length may compile again."""
    from torch._dynamo.utils import counters
    from torch.distributed.fsdp import FSDPModule

    from rft.strategy.compiled import compile_function

    policy = shared_policy(setting)
    plain = work_of(policy, "sft", "8k", setting)
    timed(policy, plain, setting)
    before = min(timed(policy, plain, setting) for _ in range(REPEATS))
    modules: list[Any] = list(policy.actor.network.modules())
    for module in modules[1:]:  # the network itself is first
        if issubclass(type(module), FSDPModule):
            module.forward = compile_function(module.forward)
    policy.actor.network.compiled = policy.world.device.type == "cuda"
    setting.shared.pop("policy")  # no later check takes it
    first = timed(policy, plain, setting)
    graphs = counters["stats"]["unique_graphs"]
    others = [timed(policy, work_of(policy, "sft", length, setting), setting) for length in OTHERS]
    took = min(timed(policy, plain, setting) for _ in range(REPEATS))
    again = counters["stats"]["unique_graphs"] - graphs
    if again or counters["graph_break"]:
        raise FailedError(f"{again} graphs for other lengths; breaks: {dict(counters['graph_break'])}")
    numbers = {"seconds_plain": before, "first_s": first, "others_s": others, "graphs": graphs, "graphs_again": again}
    found = described(policy, plain.rows, took, numbers | {"length": tokens_of("8k", setting)})
    figure = f"{took / before:.2f} of the time after {first:.0f} s, {graphs} graphs; {found.figure}"
    return Found(figure, found.numbers)


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
