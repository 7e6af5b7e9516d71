"""The limits of this version: rows are texts of one turn. A row with more is refused by the name of its field."""

from collections.abc import Mapping
from typing import Any

from rft.data.encode.masks import conversation

MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # of TRL, verl, OpenRLHF and LLaVA
AGENT = ("agent_name", "tools_kwargs", "interaction_kwargs")  # of verl, in the row or in its extra_info
SINGLE_TURN = "single_turn_agent"  # verl's name for one answer without tools
EMPTY_ALLOWED = ("rejected", "completion")  # an empty answer can be the worse one
FIELDS = ("prompt", "response", "chosen", "messages", "text", *EMPTY_ALLOWED)  # texts, or lists of chat messages
LONGEST = 5_000_000  # characters; to count the tokens of a longer text takes minutes, and no model reads it


def refuse_media(row: Mapping[str, Any], where: str) -> None:
    """Refuses a row that needs more than text.

    Args:
        row: as it is in the file.
        where: its place, for messages.

    Raises:
        ValueError: names the place and the field.
    """
    for field in MEDIA:
        if row.get(field):
            raise ValueError(
                f"{where}: the field {field!r} is not text, and this version trains on text only; remove the field "
                "(and its placeholders in the prompt), or the row"
            )
    extra = row.get("extra_info")
    for field in AGENT:
        for part in (row, extra if isinstance(extra, Mapping) else {}):
            if part.get(field) and part[field] != SINGLE_TURN:
                raise ValueError(
                    f"{where}: the field {field!r} asks for tools or several turns, and this version samples one "
                    "answer without running tools; remove the field if one answer is enough, or the row"
                )


def check_text(value: Any, field: str, where: str, cure: str) -> None:
    """Checks a field of `FIELDS`: a text, or a list of chat messages.

    Args:
        field: its name.
        where: the place of the row, for messages.
        cure: ends a message about a value of another type.

    Raises:
        ValueError: it is of another type, empty or longer than `LONGEST`; names the place and the field.
    """
    if isinstance(value, str):
        empty, size = not (value if field == "text" else value.strip()), len(value)
    elif isinstance(value, list) and value:
        try:
            messages = conversation(value, f"the field {field!r}")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        said = [message for message in messages if any(part for name, part in message.items() if name != "role")]
        empty, size = not said, sum(len(str(message.get("content"))) for message in messages)
    elif isinstance(value, list):
        empty, size = True, 0
    else:
        raise ValueError(
            f"{where}: the field {field!r} is {type(value).__name__}, not text or a list of chat messages; {cure}"
        )
    if empty and field not in EMPTY_ALLOWED:
        raise ValueError(f"{where}: the field {field!r} is empty; remove the row")
    if size > LONGEST:
        raise ValueError(
            f"{where}: the field {field!r} has {size:,} characters, over {LONGEST:,}; remove the row (a quote that is "
            "not closed joins the rows after it)"
        )
