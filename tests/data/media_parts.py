"""Content parts and messages with media, as rows of tests have them."""

import io
from typing import Any

from PIL import Image


def png(color: str, side: int = 2) -> bytes:
    """A square picture of one colour, as a file."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), color).save(file, "PNG")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")


def text(value: str) -> dict[str, Any]:
    """A content part."""
    return {"type": "text", "text": value}


def image(value: Any) -> dict[str, Any]:
    """A content part."""
    return {"type": "image", "image": value}


def user(content: Any) -> dict[str, Any]:
    """A message."""
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    """A message."""
    return {"role": "assistant", "content": content}
