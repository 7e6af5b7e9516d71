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
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of each distribution, of softmax(logits / temperature).

    Args:
        hidden: (N, D) the states that predict the targets.
        weight: (V, D) the head; bias: (V,) or None.
        targets: (N,) token ids.
        temperature: what the logits are divided by.
        with_entropy: computes the entropy too; zeros otherwise.

    Returns:
        Two tensors (N,), float32 (float64 for float64 input), in nats. Both are differentiable in hidden, weight, bias.
    """
    return _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, with_entropy)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits += bias.to(dtype)
    return logits.div_(temperature) if temperature != 1.0 else logits


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        entropy = torch.zeros_like(logprobs)
        step = max(1, CHUNK_ELEMENTS // weight.shape[0])
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            logits = _logits(hidden[part], weight, bias, temperature, dtype)  # (chunk, V)
            normalizer = logits.logsumexp(-1)
            normalizers[part] = normalizer
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normalizer
            if with_entropy:
                probabilities = (logits - normalizer[:, None]).exp_()
                entropy[part] = normalizer - torch.einsum("nv,nv->n", probabilities, logits)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropy)
        ctx.temperature, ctx.with_entropy, ctx.step = temperature, with_entropy, step
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprobs_grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers, entropy = ctx.saved_tensors
        dtype = normalizers.dtype
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias, dtype=dtype) if bias is not None else None
        use_entropy = ctx.with_entropy and bool(entropy_grad.any())
        for start in range(0, len(hidden), ctx.step):
            part = slice(start, start + ctx.step)
            logits = _logits(hidden[part], weight, bias, ctx.temperature, dtype)
            logp = logits.sub_(normalizers[part, None])
            scale = -logprobs_grad[part, None]
            if use_entropy:  # dH/dlogits = -p (log p + H)
                scale = scale - entropy_grad[part, None] * (logp + entropy[part, None])
            grad = logp.exp_().mul_(scale)
            grad.scatter_add_(-1, targets[part, None], logprobs_grad[part, None])
            grad.div_(ctx.temperature)
            hidden_grad[part] = (grad @ weight.to(dtype)).to(hidden.dtype)
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
        )
