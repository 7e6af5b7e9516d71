"""Keeps values of environment variables out of messages, log records and tracebacks of this process."""

import html
import json
import logging
import re
import sys
import threading
import traceback
from functools import cache
from types import TracebackType
from urllib.parse import quote

from rft.sanitize import printable

SHORTEST = 6  # characters; a shorter value is not searched for in messages: it may be part of any word

_hidden: dict[str, str] = {}  # values of this process, and the text that messages have in their place


def hide(value: str, source: str) -> None:
    """From now on `redact` replaces a value by its source, such as `${oc.env:NAME}`, if it is not too short."""
    for text in (value, value.strip(), *value.splitlines()):  # a header has no line end, and output comes in lines
        if len(text) >= SHORTEST:
            _hidden.setdefault(text, source)


def redact(text: str) -> str:
    """A message without hidden values, as they are and as `repr`, JSON, HTML and URLs write them.

    Longer values are replaced first.
    """
    for value in sorted(_hidden, key=len, reverse=True):
        source = _hidden[value]
        text = _spellings(value).sub(lambda found, source=source: source, text)  # type: ignore[misc]
    return text


def redact_log_records() -> None:
    """Redacts what the handlers of the root logger write, tracebacks too, without what a terminal interprets. So does
    the handler of a program that has set none."""
    last = [] if logging.lastResort is None else [logging.lastResort]
    for handler in [*logging.getLogger().handlers, *last]:
        if _redact_record not in handler.filters:
            handler.addFilter(_redact_record)


def redact_tracebacks() -> None:
    """Redacts the traceback of an error that ends this process or one of its threads."""
    sys.excepthook = _print_traceback
    threading.excepthook = lambda hook: _print_traceback(hook.exc_type, hook.exc_value, hook.exc_traceback)


def _print_traceback(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if kind is not SystemExit:  # of a thread
        sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))


def _redact_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(redact(record.getMessage())), ()
    if record.exc_info and record.exc_info[0] is not None:
        record.exc_text = redact("".join(traceback.format_exception(*record.exc_info)).rstrip())
        record.exc_info = None
    return True


@cache
def _spellings(value: str) -> re.Pattern[str]:
    """Finds a value in any mix of the spellings of its characters."""
    return re.compile("".join(map(_spelling, re.findall(r"\\+|.", value, re.DOTALL))))


def _spelling(character: str) -> str:
    """A pattern for one character, or for several backslashes, of which no level of escapes leaves fewer."""
    if character[0] == "\\":
        return rf"(?:\\{{{len(character)},}}|(?i:%(?:25)*5C){{{len(character)}}})"
    if character.isascii() and character.isalnum():
        return character
    octets = character.encode(errors="surrogateescape")
    url = quote(octets, safe="")
    if url == character:
        url = "".join(f"%{octet:02X}" for octet in octets)
    written = {repr(character)[1:-1], json.dumps(character)[1:-1], repr(octets)[2:-1], html.escape(character)}
    spaces = [r"\+"] if character == " " else []
    forms = "|".join([*map(re.escape, sorted(written | {character}, key=len, reverse=True)), *spaces])
    escaped = url.replace("%", "%(?:25)*")  # text that is quoted twice
    return rf"(?:\\*(?:{forms})|(?i:{escaped}))"
