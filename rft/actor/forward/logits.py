"""The logits of a head: which ids can follow, and blocks of the vocabulary, one at a time, in float32.

The embeddings of many checkpoints have more rows than the tokenizer has tokens, and models of one family differ in this
padding. Trainer and engines leave ids without a token, and placeholders of media, out of the softmax, so both normalise
over the same set.

On a GPU the product of 16-bit states and weights runs on tensor cores, which multiply them exactly and add in float32.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rft.batch.encoded import MediaFacts

FORBIDDEN = -1e9  # added to the logit of an id that cannot follow: its probability is 0


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The rows that embeddings need for all tokens: one more than the largest id. A tokenizer may leave out ids."""
    return 1 + max(_ids(tokenizer, len(tokenizer)), default=-1)


def forbidden_tokens(size: int, tokenizer: PreTrainedTokenizerBase, media: MediaFacts | None) -> tuple[int, ...]:
    """The ids below `size` that cannot follow, ascending: those without a token, and the placeholders of media.

    Args:
        size: rows of the model's head.
        tokenizer: of the policy. One without tokens (`mode=plan`) leaves all ids.
        media: of the policy's processor; None for a model of text.
    """
    with_token = _ids(tokenizer, len(tokenizer))
    without = set(range(size)) - with_token if with_token else set()
    placeholders = () if media is None else media.placeholders
    return tuple(sorted(without | {token for token in placeholders if token < size}))


@lru_cache(maxsize=4)  # a large vocabulary takes a tenth of a second to read, and a run asks several times
def _ids(tokenizer: PreTrainedTokenizerBase, tokens: int) -> frozenset[int]:
    """The ids that have a token. In python tokenizers several ids may share a text, under which one is listed.

    Args:
        tokens: their number, which tells the tokenizer from itself before tokens were added.
    """
    base = () if tokenizer.is_fast else range(tokenizer.vocab_size)
    return frozenset((*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder, *base))


def forbidden_logits(tokens: Sequence[int], size: int, device: torch.device) -> Tensor | None:
    """What is added to the last F of `size` logits, (F,) float32, so that these ids have no probability; None for none.

    Args:
        tokens: the ids, ascending, below `size`. F reaches from the first one to the end.
    """
    if not tokens:
        return None
    places = torch.tensor(tokens, device=device) - tokens[0]
    return torch.zeros(size - tokens[0], device=device).index_fill_(0, places, FORBIDDEN)


def forbid_(logits: Tensor, forbidden: Tensor | None) -> Tensor:
    """Adds what `forbidden_logits` returned to logits (..., V), in their place."""
    if forbidden is not None:
        logits[..., -len(forbidden) :] += forbidden
    return logits


BLOCK_ELEMENTS = {  # numbers of a block of logits or of head weights, by the type of the device
    "cpu": 2**23,  # 32 MiB in float32; malloc reuses no larger memory
    "cuda": 2**27,  # 512 MiB; a block of each product reads and writes all hidden states
}
NARROWEST = 2112  # columns of a block, at least; with fewer, threads and kernels wait for each other


@dataclass(frozen=True)
class LogitShape:
    """What a model does to the outputs of its head: logits = cap * tanh(scale * outputs / cap).

    Attributes:
        scale: factor of the outputs.
        cap: bound of the logits (soft-capping, Gemma 2, 2408.00118, section 2); None for none.
    """

    scale: float = 1.0
    cap: float | None = None

    def apply(self, outputs: Tensor) -> Tensor:
        """The logits for the outputs of the head."""
        scaled = outputs * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


PLAIN = LogitShape()


@dataclass(frozen=True)
class LogitOptions:
    """What logits a head has beside its weights.

    Attributes:
        temperature: divides the logits.
        shape: of the logits.
        forbidden: (F,) is added to the last F logits, without a gradient; or None.
        device_type: of the device that computes, if it is not that of the tensors (`mode=plan`).
    """

    temperature: float
    shape: LogitShape = PLAIN
    forbidden: Tensor | None = None
    device_type: str | None = None


Shaping = tuple[Tensor | None, float | None, Tensor | None]  # bias, cap and forbidden of the columns of a block


class LogitBlocks:
    """The logits (N, V) of a head, divided by a temperature, one block of the vocabulary at a time.

    Iterating yields a slice of the vocabulary and the logits (N, v) of it in float32 (float64 for float64 input). All
    blocks share one storage, since allocating it for every block is slow. The caller may overwrite the logits.

    Args:
        hidden: (N, D); weight: (V, D); bias: (V,) or None.
        options: of the logits.

    Attributes:
        dtype: of the logits.
        on_tensor_cores: the product takes the hidden states and the weights as they are.
        divisor: of an output of the head in what is computed of it, the logit or the argument of tanh.
        cap: of the logits, divided by the temperature; or None.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LogitOptions) -> None:
        shape, temperature = options.shape, options.temperature
        device_type = options.device_type or hidden.device.type
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.on_tensor_cores = on_tensor_cores(hidden, weight, device_type)
        self.cap = None if shape.cap is None else shape.cap / temperature
        self.divisor = (temperature if shape.cap is None else shape.cap) / shape.scale
        self.hidden = hidden if self.on_tensor_cores else self.divided(hidden)
        self.weight = weight
        self.bias = None if bias is None else bias.to(self.dtype) / self.divisor  # (V,)
        self.forbidden = options.forbidden
        # An odd multiple of 64: rows of logits begin on cache lines, and not all in the same cache set, as with powers
        # of 2. A matrix product with another row length takes up to 1.6 times as long.
        elements = BLOCK_ELEMENTS.get(device_type, BLOCK_ELEMENTS["cpu"])
        lines = max(NARROWEST, elements // max(hidden.shape)) // 64
        self.width = min((lines - 1 | 1) * 64, -(-len(weight) // 64) * 64)
        self.storage = hidden.new_empty(len(hidden), self.width, dtype=self.dtype)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for part, _, outputs in self.outputs():
            yield part, shape_(outputs, *self.shaping(part))

    def outputs(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The same with the products of the head and the hidden states, divided, in the place of the logits.

        Between the two comes the block of the head's weights (v, D), in the dtype in which it was multiplied.
        """
        for start in range(0, len(self.weight), self.width):
            part = slice(start, start + self.width)
            head = self.weight[part]
            outputs = self.storage[:, : len(head)]  # (N, v)
            if self.on_tensor_cores:
                torch.mm(self.hidden, head.T, out_dtype=self.dtype, out=outputs)
                if self.divisor != 1.0:
                    outputs /= self.divisor
            else:
                head = head.to(self.dtype)
                torch.mm(self.hidden, head.T, out=outputs)
            yield part, head, outputs

    def divided(self, hidden: Tensor) -> Tensor:
        """Hidden states (N, D) for which the products with the head need no division."""
        return hidden.to(self.dtype) / self.divisor

    def shaping(self, part: slice) -> Shaping:
        """What makes logits of the outputs of a block. A block in front of the first forbidden token gets no bias."""
        return None if self.bias is None else self.bias[part], self.cap, self._forbidden(part)

    def _forbidden(self, part: slice) -> Tensor | None:
        """(v,) of a block; None where all of its tokens can follow."""
        if self.forbidden is None:
            return None
        first = len(self.weight) - len(self.forbidden)
        end = min(part.stop, len(self.weight))
        if end <= first:
            return None
        summands = self.forbidden[max(0, part.start - first) : end - first]
        return nn.functional.pad(summands, (end - part.start - len(summands), 0))


def on_tensor_cores(hidden: Tensor, weight: Tensor, device_type: str) -> bool:
    """Whether a device multiplies hidden states with a head's weights as they are, and adds the products in float32."""
    return device_type == "cuda" and hidden.dtype == weight.dtype and hidden.dtype.itemsize < torch.float32.itemsize


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """How a GPU multiplies float32 matrices in the block: `highest`, or `high`, which rounds the factors to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def shape_(outputs: Tensor, bias: Tensor | None, cap: float | None, forbidden: Tensor | None) -> Tensor:
    """The logits of outputs of the head, in their place."""
    if bias is not None:
        outputs += bias
    if cap is not None:
        outputs.tanh_().mul_(cap)
    if forbidden is not None:
        outputs += forbidden
    return outputs
