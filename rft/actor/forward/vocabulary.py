"""Which ids of a model can follow: ids without a token and placeholders of media have the probability 0.

The embeddings of many checkpoints have more rows than the tokenizer has tokens, and models of one family differ in this
padding. Trainer and engines leave these ids out of the softmax, so both normalise over the same set.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
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
    known = _ids(tokenizer, len(tokenizer))
    without = set(range(size)) - known if known else set()
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
