"""Compares prompts as an engine with its own processor has expanded them with those that the trainer reads."""

from collections.abc import Sequence
from itertools import zip_longest

from transformers import PreTrainedTokenizerBase

SHOWN = 6  # tokens before the first difference that the message quotes


class OtherPrompt(ValueError):
    """The engine has expanded a prompt to other tokens than the trainer reads."""


def check_expanded(
    row: int, prompt: Sequence[int], expanded: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Checks that an engine samples behind the tokens of which the trainer computes the log-probabilities.

    Args:
        row: the number of the prompt among those of this rank.
        prompt: the tokens that the trainer reads.
        expanded: the tokens that the engine reports.

    Raises:
        OtherPrompt: they differ; names the row, the first position, both tokens and the cure.
    """
    if list(prompt) == list(expanded):
        return
    pairs = enumerate(zip_longest(prompt, expanded))
    index, (own, other) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
    before = tokenizer.decode(prompt[max(0, index - SHOWN) : index])
    raise OtherPrompt(
        f"prompt {row}: the engine expands its media to other tokens than the trainer reads. The first difference is "
        f"at position {index}, behind {before!r}: {_shown(own, tokenizer)} for the trainer, {_shown(other, tokenizer)} "
        f"for the engine ({len(prompt)} and {len(expanded)} tokens in all). The engine must have the same version of "
        "transformers, and the options of actor.processor without changes (rollout.engine_args.mm_processor_kwargs); "
        "otherwise set rollout=hf"
    )


def _shown(token: int | None, tokenizer: PreTrainedTokenizerBase) -> str:
    return "the end of the prompt" if token is None else f"{tokenizer.decode([token])!r} ({token})"
