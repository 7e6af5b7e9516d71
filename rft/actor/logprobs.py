"""Log-probabilities of given tokens from hidden states, without ever holding (tokens, vocabulary) whole.

The head's matrix product, log-softmax, gather and entropy run over chunks of tokens in float32; the backward pass
computes each chunk's logits again instead of keeping them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**23  # logits held at a time: 32 MiB in float32


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
    with_squares: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, entropy and sum of squares of each distribution softmax(logits / temperature).

    Args:
        hidden: (N, D) the states that predict the targets.
        weight: (V, D) the head; bias: (V,) or None.
        targets: (N,) token ids.
        temperature: what the logits are divided by.
        with_entropy: computes the entropy too; zeros otherwise.
        with_squares: computes the sum of squared probabilities too; zeros otherwise.

    Returns:
        Three tensors (N,), float32 (float64 for float64 input): log-probability and entropy in nats, both
        differentiable in hidden, weight and bias, and the sum of squares, which is not.
    """
    return _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, with_entropy, with_squares)


def _logits(hidden: Tensor, head: Tensor, bias: Tensor | None, temperature: float, room: Tensor) -> Tensor:
    """Logits (n, V), in the first rows of `room`."""
    logits = torch.mm(hidden.to(head.dtype), head.T, out=room[: len(hidden)])
    if bias is not None:
        logits += bias
    return logits.div_(temperature) if temperature != 1.0 else logits


class _TokenLogprobs(torch.autograd.Function):
    # Chunks share their storage: fresh memory of this size comes from the system page by page, which is slow.
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        with_squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        entropy, squares = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        step = max(1, CHUNK_ELEMENTS // weight.shape[0])
        head = weight.to(dtype)
        room = logprobs.new_empty(min(step, len(hidden)), len(head))  # (chunk, V)
        powers = torch.empty_like(room) if with_entropy or with_squares else room
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            logits = _logits(hidden[part], head, bias, temperature, room)  # (n, V)
            if with_entropy or with_squares:
                top = logits.amax(-1)
                power = torch.sub(logits, top[:, None], out=powers[: len(logits)]).exp_()
                total = power.sum(-1)
                normalizer = top + total.log()
                if with_entropy:
                    entropy[part] = normalizer - torch.einsum("nv,nv->n", power, logits) / total
                if with_squares:
                    squares[part] = torch.einsum("nv,nv->n", power, power) / total.square()
            else:
                normalizer = logits.logsumexp(-1)
            normalizers[part] = normalizer
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normalizer
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropy)
        ctx.temperature, ctx.with_entropy, ctx.step = temperature, with_entropy, step
        ctx.mark_non_differentiable(squares)
        return logprobs, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprobs_grad: Tensor, entropy_grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers, entropy = ctx.saved_tensors
        dtype = normalizers.dtype
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias, dtype=dtype) if bias is not None else None
        use_entropy = ctx.with_entropy and bool(entropy_grad.any())
        head = weight.to(dtype)
        room = normalizers.new_empty(min(ctx.step, len(hidden)), len(head))  # (chunk, V)
        for start in range(0, len(hidden), ctx.step):
            part = slice(start, start + ctx.step)
            logits = _logits(hidden[part], head, bias, ctx.temperature, room)
            logp = logits.sub_(normalizers[part, None])
            scale = -logprobs_grad[part, None]
            if use_entropy:  # dH/dlogits = -p (log p + H)
                scale = scale - entropy_grad[part, None] * (logp + entropy[part, None])
            grad = logp.exp_().mul_(scale)
            grad.scatter_add_(-1, targets[part, None], logprobs_grad[part, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            hidden_grad[part] = grad @ head
            if weight_grad is not None:
                weight_grad.addmm_(grad.T, hidden[part].to(dtype))
            if bias_grad is not None:
                bias_grad += grad.sum(0)
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            None,
            None,
            None,
            None,
        )
