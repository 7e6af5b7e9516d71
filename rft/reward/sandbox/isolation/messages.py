"""Messages on a socket or a pipe: four bytes with the length of the content, and the content."""

import os
import struct

HEAD = 4  # bytes of the length


def read_message(descriptor: int) -> bytes:
    """The content of the next message. Raises an OSError if the other side has closed its end."""
    (length,) = struct.unpack("!I", _read_exactly(descriptor, HEAD))
    return _read_exactly(descriptor, length)


def _read_exactly(descriptor: int, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        part = os.read(descriptor, count - len(content))
        if not part:
            raise OSError(0, "the other side has closed its end")
        content += part
    return bytes(content)


def framed(content: bytes) -> bytes:
    """The message of a content."""
    return struct.pack("!I", len(content)) + content


def write_message(descriptor: int, content: bytes) -> None:
    """Writes a message."""
    text = memoryview(framed(content))
    while text:
        text = text[os.write(descriptor, text) :]
