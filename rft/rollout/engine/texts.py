"""Texts and completions from sampled tokens, for all engines."""

from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rft.rollout.engine.base import Completion


def decode(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    """The texts of rows of tokens, without special tokens and without changes to spaces."""
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def completions(
    tokenizer: PreTrainedTokenizerBase,
    ends: list[int],
    stop: list[str],
    tokens: list[list[int]],
    logprobs: list[list[float]],
    versions: list[list[int]],
) -> list[Completion]:
    """Completions from rows of sampled tokens, each of which ends at an end token, a stop string or a limit.

    Args:
        ends, stop: end tokens and stop strings.
        tokens, logprobs, versions: one list per row, with one entry per token.
    """
    found = []
    for ids, numbers, row_versions, text in zip(tokens, logprobs, versions, decode(tokenizer, tokens), strict=True):
        places = [place for place in (text.find(string) for string in stop) if place >= 0]
        reason: Literal["stop", "length"] = "stop" if places or ids[-1] in ends else "length"
        found.append(Completion(ids, numbers, reason, text[: min(places)] if places else text, row_versions))
    return found


def describe_tokens(tokens: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Adds the `text` of tokens, and replaces the ids `before` them by their text."""
    return [
        token | {"text": tokenizer.decode([token["token"]]), "before": tokenizer.decode(token["before"])}
        for token in tokens
    ]
