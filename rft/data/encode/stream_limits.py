"""Applies the limits of `data` to the rows of a stream: long rows are dropped when they are read."""

from copy import copy

from rft.data.base import GivenTexts, SourceContext
from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import count_tokens
from rft.data.encode.truncation import PromptLimit, TextLimit
from rft.data.rows.base import RowFilter, StreamedRows
from rft.data.rows.lazy import Row, located
from rft.distributed import SINGLE_PROCESS


def check_room(buffer: int, most: int | None, context: int, new_tokens: int) -> None:
    """Raises a ValueError if a prompt of the stream and its answer may exceed the model's context."""
    if most is None or most + new_tokens > context:
        raise ValueError(
            f"data.streaming={buffer}: prompts of a stream are not counted beforehand and can be too long; "
            f"set data.max_prompt_tokens to {context - new_tokens} or less (the model's context of {context} without "
            f"rollout.max_new_tokens={new_tokens}), which drops them when they are read"
        )


def stream_filters(encoder: Encoder, given: GivenTexts | None, stream: StreamedRows) -> list[RowFilter]:
    """What drops the rows of a stream that are too long.

    Args:
        encoder: has the limits.
        given: the given texts of the source, or None.
        stream: a stream that is not opened.
    """
    filters, prompt_limit, text_limit = [], encoder.limit, encoder.text_limit
    if prompt_limit is not None and prompt_limit.truncation == "drop":
        filters.append(short_prompts(encoder, prompt_limit))
    if given is not None and text_limit is not None and text_limit.overlong != "error":
        filters.append(short_texts(encoder, text_limit, given, stream))
    return filters


def short_prompts(encoder: Encoder, limit: PromptLimit) -> RowFilter:
    """Keeps the rows of a stream whose prompts are not too long."""

    def keeps(rows: list[Row]) -> list[bool]:
        return [len(prompt) <= limit.most for prompt in encoder.whole_prompts(rows)]

    return RowFilter(keeps, f"their prompts have more tokens than data.max_prompt_tokens={limit.most}")


def short_texts(encoder: Encoder, limit: TextLimit, given: GivenTexts, stream: StreamedRows) -> RowFilter:
    """Keeps the rows of a stream whose given texts are not too long, or can be cut.

    Args:
        stream: a stream that is not opened.
    """
    whole = copy(encoder)
    whole.text_limit = None
    texts = given.build(SourceContext(SINGLE_PROCESS, 0, whole, stream, 1, (), False)).texts

    def keeps(rows: list[Row]) -> list[bool]:
        kept = []
        for number, row in enumerate(rows):
            with located(rows, number):
                kept.append(bool(limit.keeps(*count_tokens(texts(number, row), whole)[:2])))
        return kept

    why = f"they have more tokens than {limit.name}"
    if limit.overlong == "truncate":
        why += f", and {limit.uncuttable}"
    return RowFilter(keeps, why)
