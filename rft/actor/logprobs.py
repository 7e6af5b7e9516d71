"""Log-probabilities of given tokens from hidden states, without allocating all logits (tokens, vocabulary).

The head's matrix product, log-softmax, gather and entropy run in float32 over blocks of the vocabulary, each for all
tokens at once (`forward/logits.py`). The running sums are rescaled to the largest logit so far (Milakov and
Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867, section 3). The backward pass recomputes the
logits of each block. Where they come from tensor cores, its products round the float32 gradient to TF32, which has 3
bits more than bfloat16. Each pass reads every weight of the head once, and the backward pass writes its gradient once.
With blocks of tokens, each block would add to the gradient of all weights, which would have to be in float32.

What stands between the matrix products of a block can be compiled (`compiled`): one or two passes over its logits
instead of about ten. Functions that end with an underscore overwrite the outputs of the head. The compiler reads them
as functions of a copy, which it does not make.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from rft.actor.forward.logits import LogitBlocks, LogitOptions, Shaping, float32_products, shape_
from rft.strategy.compiled import compile_function

Sums = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # see `_add_block_`


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    options: LogitOptions,
    with_entropy: bool,
    with_squares: bool = False,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, entropy and sum of squares of each distribution softmax(logits / temperature).

    Args:
        hidden: (N, D) the states that predict the targets.
        weight: (V, D) the head; bias: (V,) or None.
        targets: (N,) token ids, or (N, K) for several tokens of each distribution.
        options: of the logits.
        with_entropy: computes the entropy too; zeros otherwise.
        with_squares: computes the sum of squared probabilities too; zeros otherwise.
        compiled: compiles what stands between the matrix products. The first call takes longer; a new N or V does not
            compile again.

    Returns:
        Log-probabilities (the shape of `targets`), entropy (N,) and sum of squares (N,) in float32 (float64 for
        float64 input). The first two are in nats and differentiable in hidden, weight and bias; the third has no
        gradient.
    """
    columns = targets if targets.dim() == 2 else targets[:, None]
    compiled = compiled and len(hidden) > 1  # the compiler has other code for 0 and for 1
    given = (options, with_entropy, with_squares, compiled)
    logprobs, *rest = _TokenLogprobs.apply(hidden, weight, bias, columns, *given)
    return logprobs.view(targets.shape), *rest


@torch.no_grad()
@record_function("logits")  # mode=plan counts what is allocated under this label
def top_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LogitOptions, count: int
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each distribution softmax(logits / temperature), without gradients.

    Args:
        hidden, weight, bias, options: as for `token_logprobs`.
        count: K, the number of tokens to return for each distribution.

    Returns:
        Ids (N, K) int32 and their log-probabilities (N, K), in descending order.
    """
    blocks = LogitBlocks(hidden, weight, bias, options)
    normalizer = blocks.storage.new_full((len(hidden),), -torch.inf)
    best, ids = (hidden.new_empty(len(hidden), 0, dtype=kind) for kind in (blocks.dtype, torch.int64))
    for part, logits in blocks:
        normalizer = torch.logaddexp(normalizer, logits.logsumexp(-1))
        values, columns = logits.topk(min(count, logits.shape[1]))
        best = torch.cat([best, values], 1)
        best, order = best.topk(min(count, best.shape[1]))
        ids = torch.cat([ids, columns + part.start], 1).gather(1, order)
    return ids.int(), best - normalizer[:, None]


def _columns(targets: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """The columns (N, K) of the targets in a block, 0 for targets of other blocks; and a mask (N, K) of its targets."""
    columns = targets - start
    here = (columns >= 0) & (columns < width)
    return columns.where(here, 0), here


def _add_block_(
    outputs: Tensor,
    shaping: Shaping,
    targets: Tensor,
    start: int,
    sums: Sums,
    with_entropy: bool,
    with_squares: bool,
    powers: Tensor | None = None,
) -> Sums:
    """Adds a block to the sums of the forward.

    Args:
        outputs: (N, v) of the head.
        targets: (N, K); start: the first token of the block.
        sums: the largest logit (N,) and the logits of the targets (N, K); then, of e to the power of logits less the
            largest, the sum, the sum of products with these exponents, and the sum of squares, (N,) each.
        powers: (N, v) memory for the powers, maybe that of `outputs`; None for new.
    """
    before, chosen, total, weighted, squares = sums
    logits = shape_(outputs, *shaping)
    columns, here = _columns(targets, start, logits.shape[1])
    chosen = logits.gather(-1, columns).where(here, chosen)
    top = torch.maximum(before, logits.amax(-1))
    scale = (before - top).exp()
    shifted = logits.sub_(top[:, None])
    power = torch.exp(shifted, out=powers)  # (N, v)
    if with_entropy:  # sum of p * (logit - largest logit), rescaled to the new largest logit
        weighted = (weighted + total * (before - top)) * scale + shifted.mul_(power).sum(-1)
    total = total * scale + power.sum(-1)
    if with_squares:
        squares = squares * scale.square() + power.square_().sum(-1)
    return top, chosen, total, weighted, squares


def _block_grad_(
    outputs: Tensor,
    shaping: Shaping,
    targets: Tensor,
    start: int,
    logprobs_grad: Tensor,
    normalizer: Tensor,
    offset: Tensor,
    entropy_grad: Tensor | None,
    powers: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient (N, v) of outputs of a block but for targets; columns (N, K) of the targets, and what to add there.

    Args:
        outputs, shaping, targets, start, powers: as for `_add_block_`.
        logprobs_grad: (N, K); entropy_grad: (N,) or None.
        normalizer: (N,) the logarithm of the sum of powers of all blocks.
        offset: (N,) the gradient of a logit is its probability times this, without the entropy.
    """
    _, cap, forbidden = shaping
    logits = shape_(outputs, *shaping)
    slope = None
    if cap is not None:  # of capped logits by the argument of tanh
        capped = logits if forbidden is None else logits - forbidden
        slope = cap * (1 - (capped / cap).square())
    logp = logits.sub_(normalizer[:, None])
    grad = torch.exp(logp, out=powers)
    if entropy_grad is None:
        grad.mul_(offset[:, None])
    else:  # dH/dlogits = -p (log p + H)
        grad.mul_(logp.mul_(-entropy_grad[:, None]).add_(offset[:, None]))
    columns, here = _columns(targets, start, grad.shape[1])
    added = logprobs_grad.where(here, 0)
    if slope is not None:
        grad.mul_(slope)
        added = added * slope.gather(-1, columns)
    return grad, columns, added


def _add_block(storage: Tensor, width: int, *options: Any) -> Sums:
    """`_add_block_` for the compiler: of the first columns of a storage, which stays as it is."""
    return _add_block_(storage[:, :width].clone(), *options)


def _block_grad(storage: Tensor, width: int, *options: Any) -> tuple[Tensor, Tensor]:
    """`_block_grad_` for the compiler: the gradient takes the place of the outputs."""
    outputs = storage[:, :width]
    grad, columns, added = _block_grad_(outputs.clone(), *options)
    outputs.copy_(grad)
    return columns, added


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return compile_function(function)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    @record_function("logits")
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: LogitOptions,
        with_entropy: bool,
        with_squares: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        blocks = LogitBlocks(hidden, weight, bias, options)
        first = blocks.storage.new_full((len(hidden),), torch.finfo(blocks.dtype).min)
        total, weighted, squares = (torch.zeros_like(first) for _ in range(3))
        sums = (first, first.new_zeros(targets.shape), total, weighted, squares)
        powers = torch.empty_like(blocks.storage) if with_entropy and not compiled else blocks.storage
        for part, head, outputs in blocks.outputs():
            given = (blocks.shaping(part), targets, part.start, sums, with_entropy, with_squares)
            if compiled:
                sums = _compiled(_add_block)(blocks.storage, len(head), *given)
            else:
                sums = _add_block_(outputs, *given, powers[:, : len(head)])
        top, chosen, total, weighted, squares = sums
        normalizer = top + total.log()
        entropy = total.log() - weighted / total if with_entropy else weighted
        squares = squares / total.square()
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.options, ctx.compiled = options, compiled
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*((squares,) if with_entropy else (entropy, squares)))
        return chosen - normalizer[:, None], entropy, squares

    @staticmethod
    @once_differentiable
    @record_function("logits")
    def backward(
        ctx: Any, logprobs_grad: Tensor | None, entropy_grad: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        blocks = LogitBlocks(hidden, weight, bias, ctx.options)
        divided = blocks.divided(hidden) if blocks.on_tensor_cores else blocks.hidden  # (N, D)
        hidden_grad = torch.zeros_like(divided) if ctx.needs_input_grad[0] else None
        weight_grad = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        bias_grad = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        if logprobs_grad is None:
            logprobs_grad = normalizer.new_zeros(targets.shape)
        offset = -logprobs_grad.sum(1)
        powers = blocks.storage
        if entropy_grad is not None:
            offset = offset - entropy_grad * entropy
            powers = powers if ctx.compiled else torch.empty_like(powers)
        with float32_products("high") if blocks.on_tensor_cores else nullcontext():
            for part, head, outputs in blocks.outputs():
                options = (blocks.shaping(part), targets, part.start, logprobs_grad, normalizer, offset, entropy_grad)
                if ctx.compiled:
                    grad = outputs
                    columns, added = _compiled(_block_grad)(blocks.storage, len(head), *options)
                else:
                    grad, columns, added = _block_grad_(outputs, *options, powers[:, : len(head)])  # (N, v)
                grad.scatter_add_(-1, columns, added)
                if hidden_grad is not None:
                    torch.addmm(hidden_grad, grad, head.to(blocks.dtype), out=hidden_grad)
                if weight_grad is not None and weight_grad.dtype == blocks.dtype:
                    torch.mm(grad.T, divided, out=weight_grad[part])
                elif weight_grad is not None:
                    weight_grad[part] = grad.T @ divided
                if bias_grad is not None:
                    bias_grad[part] = grad.sum(0) / blocks.divisor
        if hidden_grad is not None:
            hidden_grad = hidden_grad.div_(blocks.divisor).to(hidden.dtype)
        return hidden_grad, weight_grad, bias_grad, *(None,) * 5
