"""Kernels of attention, and log-probabilities of the head: results and gradients beside float64, and their speed."""

from functools import partial
from typing import Any

from gpu.checks import Check, FailedError, Found, Setting
from gpu.machine import fastest
from gpu.training import flash_package

LENGTHS = {True: (64, 32), False: (8192, 4096)}  # of rows whose time is measured, by whether it runs on a CPU
HEADS = {True: (2, 1, 32), False: (12, 2, 128)}  # of queries, of keys, and their width
TESTED = {True: 40, False: 500}  # tokens of the longest row that is compared with float64
ERROR = {"sdpa": 1e-6, "": 2e-2}  # of the largest number: float32 on a CPU, bfloat16 on a GPU
HEAD = {True: (32, 3000, 64), False: (8192, 151936, 1536)}  # tokens, vocabulary and width
COMPARED = {True: 32, False: 256}  # of the tokens, with float64
WAYS = ("float32", "tf32", "as trained")  # of the head's products
HEAD_ERROR = {True: 1e-5, False: 1e-3}  # of log-probabilities, in nats
GRADIENT_ERROR = {True: 1e-5, False: 1e-2}  # of the largest number


def checks() -> list[Check]:
    """The checks of this file."""
    title = "attention of packed rows beside float64, and its time"
    found = [Check("head", "log-probabilities of the head beside float64, and their time", head, rank=6, seconds=12)]
    for name, rank, seconds in (("varlen", 4, 6), ("sdpa", 5, 6), ("flash", 7, 6), ("flex", 61, 25)):
        package = flash_package() if name == "flash" else None
        run = partial(attention, name)
        found.append(Check(f"kernel:{name}", title, run, rank, seconds, cuda=name != "sdpa", package=package))
    return found


def attention(name: str, setting: Setting) -> Found:
    """Forward and backward of one layer of Qwen2.5-1.5B's shape."""
    import torch

    from rft.actor.packing.kernels.base import AttentionRule
    from rft.actor.packing.kernels.choose import make_kernel
    from rft.actor.packing.layout import PackedSegment

    device, dtype = ("cpu", torch.float32) if setting.cpu else ("cuda", torch.bfloat16)
    queries, keys, width = HEADS[setting.cpu]
    rule, most = AttentionRule(None, None, None, None), TESTED[setting.cpu]

    def drawn(tokens: int) -> list[Any]:
        shapes = [(1, heads, tokens, width) for heads in (queries, keys, keys)]
        return [torch.randn(shape, device=device).to(dtype) for shape in shapes]

    def results(kernel: Any, segments: tuple[PackedSegment, ...], given: list[Any]) -> list[Any]:
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        out = kernel.attend(*leaves, segments, rule)
        slopes = torch.linspace(-1, 1, out.numel(), device=device, dtype=out.dtype).view(out.shape)
        return [out.detach(), *torch.autograd.grad((out * slopes).sum(), leaves)]

    torch.manual_seed(0)
    kernel, plain = make_kernel(name), make_kernel("sdpa")
    segments = (PackedSegment(2, 3), PackedSegment(1, most // 2), PackedSegment(2, most - 7, prefix=1))
    given = drawn(sum(segment.rows * segment.length for segment in segments))
    pairs = zip(results(kernel, segments, given), results(plain, segments, [t.double() for t in given]), strict=True)
    error = max(float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs)
    limit = ERROR.get(name if setting.cpu else "", ERROR[""])
    if not error <= limit:
        raise FailedError(f"differs from float64 by {error:.1e} of the largest number, more than {limit:g}")
    numbers: dict[str, Any] = {"error": error}
    for length in LENGTHS[setting.cpu]:
        rows = (PackedSegment(LENGTHS[setting.cpu][0] // length, length),)
        given = drawn(LENGTHS[setting.cpu][0])
        seconds = fastest(partial(results, kernel, rows, given), setting)
        forward = 4 * queries * width * rows[0].rows * length**2 / 2  # causal
        flops = 3.5 * forward  # the backward pass computes 2.5 times as much
        numbers |= {f"seconds_{length}": seconds, f"tflops_{length}": flops / seconds / 1e12}
    parts = [f"rows of {length}: {numbers[f'tflops_{length}']:.3g} TFLOPS" for length in LENGTHS[setting.cpu]]
    return Found(f"differs by {error:.1e}; {', '.join(parts)}", numbers)


def head(setting: Setting) -> Found:
    """Log-probabilities and entropy, forward and backward: as the trainer computes them, and in float32 in two ways."""
    import torch

    from rft.actor.forward.logits import LogitOptions, float32_products
    from rft.actor.logprobs import token_logprobs

    device, dtype = ("cpu", torch.float32) if setting.cpu else ("cuda", torch.bfloat16)
    tokens, vocabulary, width = HEAD[setting.cpu]
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device).to(dtype)
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), device=device)

    def work(way: str, count: int) -> list[Any]:
        leaves = [tensor.detach().requires_grad_() for tensor in (hidden[:count], weight)]
        used = leaves if way == "as trained" else [leaf.float() for leaf in leaves]
        with float32_products("high" if way == "tf32" else "highest"):
            logprobs, entropy, _ = token_logprobs(used[0], used[1], None, targets[:count], LogitOptions(0.7), True)
            return [logprobs.detach(), entropy.detach(), *torch.autograd.grad((logprobs + entropy).sum(), leaves)]

    count = COMPARED[setting.cpu]
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden[:count], weight)]
    logp = (exact[0] @ exact[1].T / 0.7).log_softmax(-1)
    found = logp.gather(1, targets[:count, None])[:, 0], -(logp.exp() * logp).sum(-1)
    expected = [*(x.detach() for x in found), *torch.autograd.grad((found[0] + found[1]).sum(), exact)]
    del logp, found, exact
    numbers: dict[str, Any] = {}
    for way in WAYS:
        mine, name = work(way, count), way.replace(" ", "_")
        gaps = [float((one.double() - other).abs().max()) for one, other in zip(mine, expected, strict=True)]
        shares = [gap / float(other.abs().max()) for gap, other in zip(gaps[2:], expected[2:], strict=True)]
        numbers |= {f"error_{name}": max(gaps[:2]), f"gradient_error_{name}": max(shares)}
        del mine
        numbers[f"seconds_{name}"] = fastest(partial(work, way, tokens), setting, repeats=2)
    if not numbers["error_as_trained"] <= HEAD_ERROR[setting.cpu]:
        raise FailedError(f"log-probabilities differ from float64 by {numbers['error_as_trained']:.1e} nats")
    if not numbers["gradient_error_as_trained"] <= GRADIENT_ERROR[setting.cpu]:
        raise FailedError(f"gradients differ from float64 by {numbers['gradient_error_as_trained']:.1e} of the largest")
    parts = []
    for way in WAYS:
        seconds, error, gradient = (
            numbers[f"{what}_{way.replace(' ', '_')}"] for what in ("seconds", "error", "gradient_error")
        )
        parts.append(f"{way} {1e6 * seconds / tokens:.3g} us a token, off by {error:.1e}, gradients by {gradient:.1e}")
    return Found("; ".join(parts), numbers)
