"""How a response is written: in which script, such as Latin or Chinese characters, and whether it repeats itself."""

import re
import unicodedata
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from rft.ranges import Fraction, Range
from rft.reward.registry import REWARDS

Script = Literal[
    "latin", "han", "cyrillic", "greek", "arabic", "hebrew", "hangul", "hiragana", "katakana", "thai", "lao", "khmer",
    "myanmar", "tibetan", "devanagari", "bengali", "gujarati", "gurmukhi", "kannada", "malayalam", "oriya", "sinhala",
    "tamil", "telugu", "armenian", "georgian", "ethiopic", "mongolian",
]  # fmt: skip
# The Unicode name of a letter begins with its script, except for these.
NAMES = {"CJK": "han", "IDEOGRAPHIC": "han", "MODIFIER": None, "": None}


@cache
def script_of(letter: str) -> str | None:
    """The script of a letter, from its Unicode name, such as "latin"; None for a character that is no letter.

    Letters with another form of the same letter are read as the plain one (NFKC): full width, ligatures, bold.
    """
    plain = unicodedata.normalize("NFKC", letter)[0]
    if not unicodedata.category(plain).startswith("L"):
        return None
    first = re.split("[ -]", unicodedata.name(plain, ""))[0]
    return NAMES.get(first, first.lower())


@REWARDS.register(
    "script",
    fault=lambda options: None if options["scripts"] else "scripts: [] names no script; write one, such as [latin]",
)
def script(response: str, row: Mapping[str, Any], *, scripts: list[Script], without_letters: Fraction) -> float:
    """The share of the response's letters that are of the given scripts.

    Measures scripts and not languages: English and French are both Latin, and so are code and formulas. After the
    language consistency reward of DeepSeek-R1, arXiv 2501.12948, section 2.3.2, a share of words. Digits, punctuation,
    combining marks and symbols do not count.

    Args:
        scripts: names of Unicode scripts.
        without_letters: the value of a response without a letter, whose share is not defined.
    """
    found = [name for name in map(script_of, response) if name is not None]
    return sum(name in scripts for name in found) / len(found) if found else without_letters


@REWARDS.register("repetition")
def repetition(
    response: str,
    row: Mapping[str, Any],
    *,
    size: Annotated[int, Range(low=1, high=100)],
    unit: Literal["words", "characters"],
) -> float:
    """Minus the share of n-grams that repeat an earlier one, 1 - different / all; from -1 to 0.

    The repetition penalty of arXiv 2502.03373, appendix C.2, where the n-grams are of tokens. The `weight` of the term
    is the largest penalty. A response of fewer than `size` units repeats nothing: 0. Case does not count.

    Args:
        size: n, the units of an n-gram.
        unit: "words": what white space separates; "characters": all but white space, for texts without blanks.
    """
    text = response.lower()
    units = text.split() if unit == "words" else [letter for letter in text if not letter.isspace()]
    count = len(units) - size + 1
    if count < 1:
        return 0.0
    return len({tuple(units[start : start + size]) for start in range(count)}) / count - 1.0
