"""The values of media in rows: the content of a file, and what messages call a value."""

from pathlib import Path
from typing import Any


def read(value: str | bytes) -> bytes:
    """The content of a file, of its path or as it is.

    Raises:
        ValueError: the file cannot be read; names it.
    """
    if isinstance(value, bytes):
        return value
    try:
        return Path(value).read_bytes()
    except OSError as error:
        raise ValueError(f"{value} cannot be read ({error}); replace it, or remove the row") from error


def name_of(value: Any) -> str:
    """What a message calls a value."""
    if isinstance(value, str):
        return value
    return f"a file of {len(value):,} bytes" if isinstance(value, bytes) else f"a value ({type(value).__name__})"
