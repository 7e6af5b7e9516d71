"""Rows whose prompts are too long are dropped, and that is said."""

from collections.abc import Callable

from rft.data.encode import Encoder
from rft.data.lazy import Rows, chosen
from rft.data.mixture import Mixed


def drop_long(rows: Rows, encoder: Encoder, most: int | None, key: str, say: Callable[[str], None]) -> Rows:
    """The rows whose prompts have at most so many tokens; says how many others there were.

    Args:
        most: tokens of a prompt, with the template; None for all rows.
        key: of the rows in the yaml.

    Raises:
        ValueError: no row is left, or none of a part of a mixture; or a prompt cannot be encoded.
    """
    if most is None:
        return rows
    lengths = [len(prompt) for prompt in encoder.prompts(rows)]
    short = [number for number, length in enumerate(lengths) if length <= most]
    if len(short) == len(rows):
        return rows
    said = (
        f"{key}: {len(rows) - len(short)} of {len(rows)} prompts have more tokens than data.max_prompt_tokens={most}; "
        f"the longest has {max(lengths)}"
    )
    if not short:
        raise ValueError(f"{said}, the shortest {min(lengths)}, and no row is left; raise data.max_prompt_tokens")
    say(f"{said}. They are dropped")
    return rows.kept(short, key) if isinstance(rows, Mixed) else chosen(rows, short)
