"""Reads JSON, RFC 8259, with limits that section 9 of it allows. A value that is read can be written again."""

import json
import math
import re
from collections import Counter
from functools import cache, partial
from typing import Any

from rft.sanitize import valid_text

DEEPEST = 64  # levels of lists and objects; templates, tools and logs read the value again
BLANKS = re.compile(r"[ \t\n\r]*")  # what JSON allows between values
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
TOO_DEEP = f"lists and objects are nested more than {DEEPEST} levels deep; write it flatter"


def value_at(
    text: str,
    place: int = 0,
    *,
    unique: bool = False,
    finite: bool = True,
    digits: int | None = None,
    origin: str | None = None,
) -> tuple[Any, int]:
    """The value at an index of a text, behind blanks, and the index of its end.

    Args:
        unique: refuses a key that occurs twice in an object, of which otherwise the last counts.
        finite: refuses NaN, Infinity and numbers beyond float64, which Python reads as floats.
        digits: most digits of an integer; None: as many as Python reads (4300).
        origin: halves of surrogate pairs become U+FFFD, with one warning that names this origin; None refuses them.

    Raises:
        json.JSONDecodeError: it is not JSON.
        ValueError: it is, beyond these limits, or nested more than 64 levels deep.
    """
    start = after_blanks(text, place)
    try:
        value, end = _decoder(unique, finite, digits).raw_decode(text, start)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if text.count("[", start, end) + text.count("{", start, end) > DEEPEST and _too_deep(value):
        raise ValueError(TOO_DEEP)
    if SURROGATE.search(text, start, end):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            if origin is not None:
                return valid_text(value, origin), end
            half = error.object[error.start].encode("unicode-escape").decode()
            raise ValueError(f"half of a surrogate pair, {half}, is no character; write the text in UTF-8") from None
    return value, end


def value_of(text: str, *, unique: bool = False, origin: str | None = None) -> Any:
    """The value that is the whole text. Arguments and errors as of `value_at`."""
    value, end = value_at(text, unique=unique, origin=origin)
    if (end := after_blanks(text, end)) < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def after_blanks(text: str, place: int) -> int:
    """The index of the first character from an index on that is no blank."""
    found = BLANKS.match(text, place)
    assert found is not None, "it matches an empty text"
    return found.end()


@cache
def _decoder(unique: bool, finite: bool, digits: int | None) -> json.JSONDecoder:
    """Without a hook where none is needed: hooks are slow where there are many numbers."""
    hooks: dict[str, Any] = {"object_pairs_hook": _unique} if unique else {}
    if finite:
        hooks |= {"parse_constant": _no_number, "parse_float": _finite}
    if digits is not None:
        hooks["parse_int"] = partial(_short, digits)
    return json.JSONDecoder(**hooks)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r:.60} occurs twice in one object; remove one")
    return value


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.20} is beyond float64")
    return number


def _short(most: int, text: str) -> int:
    if (size := len(text.lstrip("-"))) > most:
        raise ValueError(f"a number of {size:,} digits; write it as a text")
    return int(text)


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
    return any(isinstance(item, dict | list) for item in level)
