"""Is a response written in a language, or in one script, such as Latin or Chinese characters?

py3langid identifies languages, with the model that the package contains.
"""

import importlib.util
import re
import unicodedata
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from rft.data.encode.parts import conversation, text_of
from rft.ranges import Fraction
from rft.reward.term import REWARDS

# Fenced blocks, the last one also without its end, and formulas.
NO_PROSE = re.compile(
    r"^ {0,3}```.*?(?:^ {0,3}```|\Z)|\$\$.*?\$\$|\$[^$\n]*\$|\\\[(?:(?!\\\[).)*?\\\]|\\\((?:(?!\\\().)*?\\\)",
    re.M | re.S,
)
PARAGRAPHS = re.compile(r"\n\s*\n")
Script = Literal[
    "latin", "han", "cyrillic", "greek", "arabic", "hebrew", "hangul", "hiragana", "katakana", "thai", "lao", "khmer",
    "myanmar", "tibetan", "devanagari", "bengali", "gujarati", "gurmukhi", "kannada", "malayalam", "oriya", "sinhala",
    "tamil", "telugu", "armenian", "georgian", "ethiopic", "mongolian",
]  # fmt: skip
# The Unicode name of a letter begins with its script, except for these.
NAMES = {"CJK": "han", "IDEOGRAPHIC": "han", "MODIFIER": None, "": None}


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)


def language_fault(code: str | None) -> str | None:
    """What is wrong with a language code ("en") and with this installation; None if nothing is."""
    if importlib.util.find_spec("py3langid") is None:
        return 'identifying a language needs the package py3langid: pip install "rft[language]"'
    codes = _identifier().labels
    if code is not None and code not in codes:
        return f"{code!r} is no code of a known language; write one of {', '.join(sorted(codes))}"
    return None


def language_of(text: str) -> str | None:
    """The ISO 639 code of the most likely language of a text; None if it has no letter."""
    return str(_identifier().classify(text)[0]) if any(map(str.isalpha, text)) else None


def _fault(language: str | None) -> str | None:
    fault = language_fault(language)
    return None if fault is None else f"language={'null' if language is None else language}: {fault}"


def _wanted(row: Mapping[str, Any], language: str | None) -> str:
    """The language in which a response to the row should be.

    Raises:
        ValueError: it should be that of the prompt, which has no letter.
    """
    if language is not None:
        return language
    prompt = row["prompt"]
    if isinstance(prompt, list):
        asked = [message["content"] for message in conversation(prompt, "the prompt") if message["role"] == "user"]
        prompt = text_of(asked[-1]) if asked else ""
    if (found := language_of(_prose(prompt))) is None:
        raise ValueError(f"the prompt {prompt!r:.80} has no words, so it is in no language; set the term's language")
    return found


def _prose(text: str) -> str:
    return NO_PROSE.sub(" ", text)


@REWARDS.register(
    "language", reads=lambda language: ("prompt",) if language is None else (), fault=_fault, gold=_wanted
)
def language(
    response: str,
    row: Mapping[str, Any],
    *,
    language: str | None,
    score: Literal["all", "share"],
    without_letters: Fraction,
) -> float:
    """1 where the response is in a language, else 0; or the share of it that is.

    Fenced blocks of code and formulas between dollar signs, \\( \\) or \\[ \\] do not count. Beside `script`, which
    cannot tell English from French. A text of a few words is often identified wrongly.

    Args:
        language: the ISO 639 code; null: that of the prompt, of a chat that of its last user message.
        score: all: of the whole text; share: each paragraph is identified by itself, and counts by its letters.
        without_letters: the value of a response without a letter.
    """
    wanted = _wanted(row, language)
    prose = _prose(response)
    parts = PARAGRAPHS.split(prose) if score == "share" else [prose]
    sizes = [sum(map(str.isalpha, part)) for part in parts]
    if not sum(sizes):
        return without_letters
    right = [size for part, size in zip(parts, sizes, strict=True) if language_of(part) == wanted]
    return sum(right) / sum(sizes)


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
    fault=lambda scripts: None if scripts else "scripts: [] names no script; write one, such as [latin]",
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
    written = [name for name in map(script_of, response) if name is not None]
    return sum(name in scripts for name in written) / len(written) if written else without_letters
