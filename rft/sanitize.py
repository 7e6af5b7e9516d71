"""Names and texts from outside as metrics, files and a terminal take them. From outside are data, functions of the
user, models, tools and servers. Without torch: workers of rewards import it.
"""

import logging
import re
import zlib
from functools import cache
from typing import Any

LONGEST_NAME = 64  # characters
MOST_NAMES = 64  # of one origin
SHOWN = 2000  # characters of a text in a message
OTHER = "other"
HALF_PAIR = re.compile("[\ud800-\udfff]")
WORD = r"[\w+@%-][\w.+@%-]*"
NAME = re.compile(rf"{WORD}([ /]{WORD})*")
# The run's own metrics have these in this place: `reward/<term>/unscored/<reason>`, `eval/<set>/accuracy_stderr`.
OWN_NAME = re.compile(r"unscored(/.*)?|.*_stderr")


def spell_name(name: object) -> str:
    """A name as a part of the name of a metric: at most 64 letters, digits, `_.+@%-`, single blanks and slashes.

    A name of another kind, or one that the run has itself, is changed and ends with a checksum of what it was:
    different names stay different, on all ranks alike.
    """
    text = str(name)
    if len(text) <= LONGEST_NAME and NAME.fullmatch(text) and not OWN_NAME.fullmatch(text):
        return text
    words = "_".join(re.findall(WORD, text[:LONGEST_NAME]))[: LONGEST_NAME - 9]
    return f"{words or 'name'}_{zlib.crc32(text.encode(errors='surrogatepass')):08x}"


def check_metric_name(name: str, key: str) -> None:
    """Refuses a name of the yaml that no metric can have.

    Args:
        key: of the name.

    Raises:
        ValueError: names the key and the cure.
    """
    if "/" in name or spell_name(name) != name:
        raise ValueError(
            f"{key}: names of metrics have the name {one_line(name)!r}, so it must be at most {LONGEST_NAME} letters, "
            "digits, `_.+@%-` or single blanks, and not unscored or end with _stderr; rename it"
        )


class Names:
    """The names of one origin, such as the further numbers of a reward term.

    Args:
        origin: in warnings.
        known: names that the run itself gives, which are neither counted nor changed.
        most: of the others.
    """

    def __init__(self, origin: str, known: frozenset[str] = frozenset(), most: int = MOST_NAMES) -> None:
        self._origin = origin
        self._most = most
        self._known = known
        self._spelled: dict[object, str] = {}
        self._changed = False

    def spell(self, name: object) -> str | None:
        """The name as `spell_name` has it; None once there are too many others. The first change and the first name too
        many are logged."""
        if name in self._known:
            return str(name)
        if name not in self._spelled:
            if len(self._spelled) == self._most:
                warn_once(f"{self._origin}: there are more than {self._most} names; metrics have only the first")
                return None
            self._spelled[name] = spell_name(name)
            if self._spelled[name] != name and not self._changed:
                self._changed = True
                shown = f"{one_line(str(name), LONGEST_NAME)!r} is {self._spelled[name]!r}"
                warn_once(f"{self._origin}: names that metrics cannot have are changed, {shown}")
        return self._spelled[name]


def printable(text: str) -> str:
    """A text with blanks in the place of characters that a terminal interprets, but for line breaks and tabs."""
    return text if text.isprintable() else "".join(one if one.isprintable() or one in "\n\t" else " " for one in text)


def one_line(text: str, most: int = SHOWN) -> str:
    """The beginning of a text, with blanks in the place of line breaks and of what a terminal interprets."""
    return "".join(one if one.isprintable() else " " for one in text[:most])


def valid_text(value: Any, where: str) -> Any:
    """A value of JSON with U+FFFD in the place of half surrogate pairs, which files and tokenizers do not take.

    Args:
        where: it is from, for a warning, which is logged once.
    """
    if isinstance(value, dict):
        return {valid_text(name, where): valid_text(item, where) for name, item in value.items()}
    if isinstance(value, list):
        return [valid_text(item, where) for item in value]
    if not isinstance(value, str) or not HALF_PAIR.search(value):
        return value
    warn_once(f"{where}: half of a surrogate pair is no character, and becomes U+FFFD")
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@cache
def warn_once(message: str) -> None:
    """Logs a warning the first time that this process has it."""
    logging.getLogger(__name__).warning("%s", message)
