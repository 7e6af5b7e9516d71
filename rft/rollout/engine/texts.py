"""What every engine makes of sampled tokens: the tokens that end a row, texts, and why a row ended."""

from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rft.rollout.engine.base import Completion


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a row: those of the model's generation config and the tokenizer's own, in order."""
    assert model.generation_config is not None, "a model that generates has a generation config"
    named = model.generation_config.eos_token_id
    ends = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id} - {None}
    return sorted(ends)


def decode(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    """The texts of the tokens, as they are: no special tokens, no tidying of spaces."""
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def completions(
    tokenizer: PreTrainedTokenizerBase,
    ends: list[int],
    stop: list[str],
    drawn: list[list[int]],
    logprobs: list[list[float]],
    versions: list[list[int]],
) -> list[Completion]:
    """Completions of rows of sampled tokens, which were cut at an end token, a stop string or a limit.

    Args:
        ends, stop: end tokens and stop strings.
        drawn, logprobs, versions: of each row, per token.
    """
    found = []
    for tokens, numbers, stamps, text in zip(drawn, logprobs, versions, decode(tokenizer, drawn), strict=True):
        places = [place for place in (text.find(string) for string in stop) if place >= 0]
        reason: Literal["stop", "length"] = "stop" if places or tokens[-1] in ends else "length"
        found.append(Completion(tokens, numbers, reason, text[: min(places)] if places else text, stamps))
    return found


def describe_tokens(tokens: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Worst tokens as people read them: with the `text` of each, and of what stands `before` it."""
    return [
        token | {"text": tokenizer.decode([token["token"]]), "before": tokenizer.decode(token["before"])}
        for token in tokens
    ]
