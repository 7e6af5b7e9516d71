"""Applies the limits of `data` to rows before a model is loaded: long rows are dropped, cut or refused."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from rft.data.base import GivenTexts
from rft.data.encode.fates import explain
from rft.data.encode.lengths import Counts, Lengths, limit_prompts, limit_texts
from rft.data.encode.truncation import PromptLimit, TextLimit
from rft.data.rows.lazy import Rows
from rft.errors import prefixed


def check_lengths(key: str, counts: ArrayLike, context: int, new_tokens: int) -> None:
    """Checks that each prompt and a response of the maximal length fit into the model's context.

    Args:
        counts: tokens of each prompt of the set of that key.
        context: most tokens of a text that the model reads.
    """
    longest, most = int(np.argmax(counts)), int(np.max(counts))
    if most + new_tokens > context:
        raise ValueError(
            f"{key}: the prompt of row {longest + 1} has {most} tokens; with rollout.max_new_tokens="
            f"{new_tokens} that is over the model's context of {context}; lower rollout.max_new_tokens, take the row "
            "out or choose a model with a longer context"
        )


def fit_prompts(
    key: str, rows: Rows, lengths: Lengths, limit: PromptLimit | None, log: Callable[[str], None]
) -> tuple[Rows, Counts]:
    """Applies `data.truncation` to rows with prompts.

    Args:
        key: of the rows.
        lengths: counts the tokens of rows.
        limit: None keeps all rows.
        log: shows a message to the user.

    Returns:
        The rows that stay, and the tokens of their prompts.

    Raises:
        ValueError: a prompt cannot be encoded, or is too long; names the key and the row.
    """
    with prefixed(f"{key}: "):
        counts = lengths.whole_prompts(rows)
    return limit_prompts(rows, counts, limit, key, log)


def fit_texts(
    key: str, rows: Rows, lengths: Lengths, limit: TextLimit, given: GivenTexts, log: Callable[[str], None]
) -> tuple[Rows, Counts]:
    """Applies `data.overlong` to rows of given texts.

    Logs how many answers of conversations train, and how many pairs have two equal responses.

    Args:
        key: of the rows.
        lengths: counts the tokens of rows.
        log: shows a message to the user.

    Returns:
        The rows that stay, and their tokens.

    Raises:
        ValueError: a text cannot be encoded, or is too long; names the key and the row.
    """
    with prefixed(f"{key}: "):
        texts = lengths.texts(given, rows)
    kept = limit_texts(rows, texts, limit, key, log)
    kept_texts = limit.keeps(texts.tokens, texts.least)  # (N,)
    if (message := explain(texts.answers[kept_texts].sum(0).tolist())) is not None:
        log(f"{key}: {message}")
    if equal := int(texts.equal[kept_texts].sum()):
        log(
            f"{key}: {equal:,} of {int(kept_texts.sum()):,} pairs have two equal responses, which hold no preference "
            "and count as other pairs do; remove them"
        )
    return kept
