"""One way to log-probabilities, forward and backward: python -m bench.logprob_side <way> <folder> <options as JSON>.

It runs in its own process, so that its peak memory can be read from /proc, or from torch on a GPU.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor, Tensor | None]  # log-probabilities and entropies, (N,) each
Way = Callable[[Tensor, Tensor, Tensor, bool], Outputs]
WARMUP = 64  # tokens
TRL_ROWS = 8  # TRL computes all logits, and log-probabilities row by row


def rft(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Outputs:
    """The function that the actor calls."""
    from rft.actor.forward.logits import LogitOptions
    from rft.actor.logprobs import token_logprobs

    return token_logprobs(hidden, weight, None, targets, LogitOptions(1.0), entropy)[:2]


def rft_compiled(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Outputs:
    """`rft` as the actor calls it on a GPU with strategy.compile=true."""
    from rft.actor.forward.logits import LogitOptions
    from rft.actor.logprobs import token_logprobs

    return token_logprobs(hidden, weight, None, targets, LogitOptions(1.0), entropy, compiled=True)[:2]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Outputs:
    """Plain PyTorch: logits in the model's dtype, log-softmax in float32, autograd."""
    logp = (hidden @ weight.T).log_softmax(-1, dtype=torch.float32)  # (N, V)
    chosen = logp.gather(-1, targets[:, None])[:, 0]
    return chosen, -(logp.exp() * logp).sum(-1) if entropy else None


def trl_fused(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Outputs:
    """TRL's GRPOTrainer: chunks of tokens and vocabulary (`add_fused_lm_head`)."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as COLUMNS

    outputs = ("entropy",) if entropy else ()
    found = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, COLUMNS, None, 1.0, outputs)
    return found[0], found[1]


def trl_whole(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Outputs:
    """TRL's other trainers: all logits, then `selective_log_softmax` and `entropy_from_logits`."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    rows = TRL_ROWS if len(hidden) % TRL_ROWS == 0 else 1
    logits = (hidden @ weight.T).view(rows, -1, len(weight))
    logprobs = selective_log_softmax(logits, targets.view(rows, -1)).flatten()
    return logprobs, entropy_from_logits(logits).flatten() if entropy else None


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Outputs:
    """Liger's fused linear for losses on policies: kernels on some GPUs, else chunks of tokens in PyTorch."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    found = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets, return_entropy=entropy)
    return (-found[0], found[1]) if entropy else (-found, None)


WAYS: dict[str, Way] = {
    "rft": rft,
    "rft_compiled": rft_compiled,
    "plain": plain,
    "trl_fused": trl_fused,
    "trl_whole": trl_whole,
    "liger": liger,
}


def main(way: str, folder: Path, options: dict[str, Any]) -> None:
    """Writes `<way>.json` and some of the gradients, `<way>.pt`, into the folder."""
    generator = torch.Generator().manual_seed(0)
    tokens, vocabulary, size = options["tokens"], options["vocab"], options["hidden"]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options["dtype"]]
    device = options["device"]
    hidden = torch.randn(tokens, size, generator=generator).to(device, dtype)
    weight = torch.randn(vocabulary, size, generator=generator).div_(size**0.5).to(device, dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    weights = torch.randn(tokens, generator=generator).to(device)

    def work(tokens: int) -> tuple[Tensor, ...]:
        leaves = [hidden[:tokens].requires_grad_(), weight.requires_grad_()]
        logprobs, entropy = WAYS[way](leaves[0], leaves[1], targets[:tokens], options["entropy"])
        loss = (weights[:tokens] * logprobs).sum()
        found = torch.autograd.grad(loss if entropy is None else loss + entropy.sum(), leaves)
        if device == "cuda":
            torch.cuda.synchronize()
        return found

    started = time.perf_counter()
    work(tokens if way == "rft_compiled" else min(tokens, WARMUP))
    first = time.perf_counter() - started
    seconds, cpu, grown = [], [], []
    for _ in range(options["repeats"]):
        before = forget_peak(device)
        started, worked = time.perf_counter(), time.process_time()
        gradients = work(tokens)
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - worked)
        grown.append(peak(device) - before)
        projected = gradients[1].float() @ torch.linspace(-1, 1, size, device=device)  # (V,) instead of (V, D)
        torch.save({"hidden": gradients[0].float().cpu(), "weight": projected.cpu()}, folder / f"{way}.pt")
        del gradients, projected
    found = {
        "first": first,
        "seconds": seconds,
        "cpu": cpu,
        "grown": max(grown),
        "inputs": hidden.nbytes + weight.nbytes + targets.nbytes + weights.nbytes,
        "gradients": hidden.nbytes + weight.nbytes,
    }
    (folder / f"{way}.json").write_text(json.dumps(found))


def resident(field: str) -> int:
    """Memory of this process in bytes: `VmRSS` is the current resident memory, `VmHWM` its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak(device: str = "cpu") -> int:
    """The peak memory since `forget_peak` in bytes: of this process, or of the tensors on the GPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")


def forget_peak(device: str = "cpu") -> int:
    """Resets `peak` to the current memory, and returns it in bytes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
