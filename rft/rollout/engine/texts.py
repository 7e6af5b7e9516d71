"""Texts and completions from sampled tokens, for all engines."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rft.rollout.engine.base import Completion, Request


def decode(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    """The texts of rows of tokens, without special tokens and without changes to spaces."""
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stop_tokens(tokenizer: PreTrainedTokenizerBase, stop: list[str]) -> list[int]:
    """The ids of the stop strings that are special tokens. They are end tokens: no text has them, see `decode`."""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [special[string] for string in stop if string in special]


def make_completion(
    tokenizer: PreTrainedTokenizerBase,
    ends: list[int],
    stop: list[str],
    tokens: list[int],
    logprobs: list[float],
    versions: list[int],
) -> Completion:
    """The completion of sampled tokens, which end at an end token, a stop string or a limit.

    Args:
        ends, stop: end tokens and stop strings.
        tokens, logprobs, versions: one entry per token.
    """
    [text] = decode(tokenizer, [tokens])
    places = [place for place in (text.find(string) for string in stop) if place >= 0]
    reason: Literal["stop", "length"] = "stop" if places or tokens[-1] in ends else "length"
    return Completion(tokens, logprobs, reason, text[: min(places)] if places else text, versions)


def until_stop(tokenizer: PreTrainedTokenizerBase, stop: list[str], tokens: list[int]) -> int:
    """How many of the tokens the text needs to have a stop string; all of them if it has none."""

    def stopped(count: int) -> bool:
        [text] = decode(tokenizer, [tokens[:count]])
        return any(string in text for string in stop)

    return min(len(tokens), bisect_left(range(len(tokens)), True, key=stopped)) if stop else len(tokens)


def in_order(found: Mapping[tuple[int, int], Completion], requests: Sequence[Request]) -> list[list[Completion]]:
    """The completions of each request, in the order of its seeds.

    Args:
        found: by the numbers of the request and of the sample.
    """
    return [[found[number, n] for n in range(len(request.seeds))] for number, request in enumerate(requests)]


def describe_tokens(tokens: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Adds the `text` of tokens, and replaces the ids `before` them by their text."""
    return [
        token | {"text": tokenizer.decode([token["token"]]), "before": tokenizer.decode(token["before"])}
        for token in tokens
    ]
