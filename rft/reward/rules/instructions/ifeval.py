r"""Does a response follow the verifiable instructions of its row? The rows and rules are those of IFEval.

The 25 instructions (arXiv 2311.07911, table 2) are functions of a text and its arguments.

Names and arguments are those of the published rows. The conditions are those of the paper's program
(google-research/instruction_following_eval), with these differences: words to look for are texts, not regular
expressions; sentences and words in capitals are found by the patterns below instead of nltk; empty paragraphs are never
counted; signs alone are no title; and a text without letters is in no language. The time of a check grows no faster
than the length of the text, whatever a model writes.
"""

import json
import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from rft.errors import prefixed
from rft.ranges import NonNegativeInt, PositiveInt
from rft.registry import Plugin, Registry
from rft.reward.rules.instructions.language import language_fault, language_of
from rft.reward.term import REWARDS

INSTRUCTIONS = Registry("instruction", imports=False)  # rows of data have their names
Relation = Literal["less than", "at least"]

CLOSED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
FENCE = re.compile(r"\A```(?:json)?(.*?)(?:```)?\Z", re.IGNORECASE | re.DOTALL)
WORD = re.compile(r"[^\W_]+(?:[-'\u2019.&_][^\W_]+)*")
# A sentence ends behind a mark, with closing quotes or brackets, before white space.
SENTENCE_END = re.compile(
    r"(?<![.!?\u2026])(?P<mark>[.!?\u2026]++)(?P<closed>[\"'\u201d\u2019)\]*]*+)(?=\s|\Z)|[\u3002\uff01\uff1f]++"
)
ELLIPSIS = re.compile(r"\.\.+|\u2026+")
CLOSING = frozenset("\"'\u201d\u2019)]")
NEXT = re.compile(r"(?P<gap>[\s\"'\u201c\u2018(\[*]*)(?P<word>\w*)")
# Behind a number or letter of a list and `never`, a full stop ends no sentence; behind `number` none before a number;
# behind `last`, which may stand last, it ends one before a word that often stands first.
SHORT = re.compile(
    r"^[ \t]*(?:\d+|[a-z])\.\Z"
    r"|\b(?:(?P<never>mrs?|ms|dr|prof|st|mt|gen|col|capt|lt|sgt|rev|hon|gov|sen|vs|e\.g|i\.e|cf|approx)"
    r"|(?P<number>nos?|figs?|vols?|ch|pp)"
    r"|(?P<last>etc|inc|ltd|co|corp|jr|sr|al|ave|blvd|ft|lbs?|oz|jan|feb|aug|sept?|oct|nov|dec|[a-z]))\.\Z",
    re.I | re.M,
)
FIRST = re.compile(
    "An?|And|As|At|But|By|For|He|Her|His|How|However|If|In|Its?|My|No|On|Our|She|So|That|The|Their|Then|There|These|"
    "They|This|Those|To|We|What|When|Where|While|Who|Why|Yes|Your?|I"
)
BEFORE = 16  # characters before a full stop that are searched for an abbreviation


def sentences(text: str) -> int:
    """The number of sentences; text after the last end is one if it has words."""
    count, start = 0, 0
    for end in SENTENCE_END.finditer(text):
        if end["mark"] is None or _ends(text, start, end):
            count += bool(WORD.search(text, start, end.end()))
            start = end.end()
    return count + bool(WORD.search(text, start))


def _ends(text: str, start: int, end: re.Match[str]) -> bool:
    """Whether a match of `SENTENCE_END` ends the sentence that begins at `start`."""
    following = NEXT.match(text, end.end())
    assert following is not None
    gap, word = following.groups()
    if word[:1].islower() and (ELLIPSIS.fullmatch(end["mark"]) or CLOSING.intersection(end["closed"])):
        return False
    if end["mark"] != ".":
        return True
    short = SHORT.search(text[max(start, end.start() - BEFORE) : end.start() + 1])
    if short is None:
        return True
    if short["last"]:
        return FIRST.fullmatch(word) is not None or "\n\n" in gap
    return short["number"] is not None and not word[:1].isdigit()


def compares(number: int, relation: Relation, bound: int) -> bool:
    """Whether a number is less than the bound, or at least the bound."""
    return number < bound if relation == "less than" else number >= bound


def _paragraphs(text: str, divider: str) -> list[str]:
    """The parts of a text between dividers, without an empty first and last one."""
    parts = [part.strip() for part in text.split(divider)]
    return parts[not parts[0] : len(parts) - (len(parts) > 1 and not parts[-1])]


@INSTRUCTIONS.register("keywords:existence")
def existence(text: str, *, keywords: list[str]) -> bool:
    """All keywords occur."""
    return all(word.casefold() in text.casefold() for word in keywords)


@INSTRUCTIONS.register("keywords:frequency")
def keyword_frequency(text: str, *, keyword: str, frequency: NonNegativeInt, relation: Relation) -> bool:
    """The keyword occurs so often, also inside of words."""
    return compares(text.casefold().count(keyword.strip().casefold()), relation, frequency)


@INSTRUCTIONS.register("keywords:forbidden_words")
def forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    """None of the words occurs as a word of its own."""
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


@INSTRUCTIONS.register(
    "keywords:letter_frequency",
    fault=lambda letter: None if len(letter.strip()) == 1 else f"letter={letter!r}: write one character",
)
def letter_frequency(text: str, *, letter: str, let_frequency: NonNegativeInt, let_relation: Relation) -> bool:
    """The letter occurs so often, in either case."""
    return compares(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def _no_language(language: str) -> str | None:
    fault = language_fault(language)
    return None if fault is None else f"language: {fault}"


@INSTRUCTIONS.register("language:response_language", fault=_no_language)
def response_language(text: str, *, language: str) -> bool:
    """The text is in the language."""
    return language_of(text) == language


@INSTRUCTIONS.register("length_constraints:number_sentences")
def number_sentences(text: str, *, num_sentences: NonNegativeInt, relation: Relation) -> bool:
    """The text has so many sentences."""
    return compares(sentences(text), relation, num_sentences)


@INSTRUCTIONS.register("length_constraints:number_paragraphs")
def number_paragraphs(text: str, *, num_paragraphs: NonNegativeInt) -> bool:
    """The text has exactly so many paragraphs between lines of ***, none of them empty."""
    parts = _paragraphs(text, "***")
    return all(parts) and len(parts) == num_paragraphs


@INSTRUCTIONS.register("length_constraints:number_words")
def number_words(text: str, *, num_words: NonNegativeInt, relation: Relation) -> bool:
    """The text has so many words. Signs that combine with a letter, such as vowels of Hindi, end no word."""
    if not text.isascii():
        text = "".join(sign for sign in text if not unicodedata.category(sign).startswith("M"))
    return compares(len(re.findall(r"\w+", text)), relation, num_words)


@INSTRUCTIONS.register("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(
    text: str, *, num_paragraphs: PositiveInt, nth_paragraph: PositiveInt, first_word: str
) -> bool:
    """The text has exactly so many paragraphs between blank lines, and the n-th begins with the word."""
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(parts) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = re.split(r"[.,?!'\"]", parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"'))[0]
    return word.lower() == first_word.lower()


@INSTRUCTIONS.register("detectable_content:number_placeholders")
def number_placeholders(text: str, *, num_placeholders: NonNegativeInt) -> bool:
    """The text has at least so many [placeholders], each in one line."""
    return sum("[" in part for line in text.split("\n") for part in line.split("]")[:-1]) >= num_placeholders


@INSTRUCTIONS.register("detectable_content:postscript")
def postscript(text: str, *, postscript_marker: str) -> bool:
    """The text has a postscript: P.S., P.P.S, or another marker."""
    known = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    marker = postscript_marker.strip()
    return re.search(known.get(marker, re.escape(marker)), text, re.IGNORECASE) is not None


@INSTRUCTIONS.register("detectable_format:number_bullet_lists")
def number_bullet_lists(text: str, *, num_bullets: NonNegativeInt) -> bool:
    """Exactly so many lines begin with * (and not **) or -; a * at the very end of the text begins none."""
    return len(re.findall(r"^[^\S\n]*(?:\*(?=[^*])|-)", text, re.MULTILINE)) == num_bullets


@INSTRUCTIONS.register("detectable_format:constrained_response")
def constrained_response(text: str) -> bool:
    """One of the three answers "My answer is yes.", "... no.", "... maybe." occurs."""
    return any(answer in text for answer in CLOSED)


@INSTRUCTIONS.register("detectable_format:number_highlighted_sections")
def number_highlighted_sections(text: str, *, num_highlights: NonNegativeInt) -> bool:
    """At least so many parts of lines stand between * and *, or ** and **, and are not blank."""
    single = [part for part in re.findall(r"\*[^\n*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*([^\n*]*)\*\*", text) if part.strip()]
    return len(single) + len(double) >= num_highlights


@INSTRUCTIONS.register("detectable_format:multiple_sections")
def multiple_sections(text: str, *, section_spliter: str, num_sections: NonNegativeInt) -> bool:
    """At least so many sections begin with the word and a number, "Section 1"."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


@INSTRUCTIONS.register("detectable_format:json_format")
def json_format(text: str) -> bool:
    """The whole text is JSON, which may stand in a fenced block."""
    text = text.strip()
    fenced = FENCE.match(text)
    try:
        json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


@INSTRUCTIONS.register("detectable_format:title")
def title(text: str) -> bool:
    """The text has a title in double angular brackets, <<title>>."""
    lines = [line for line in text.split("\n") if "<<" in line and ">>" in line]
    return any(re.search(r"[^\s<>]", line[line.find("<<") : line.rfind(">>")]) for line in lines)


@INSTRUCTIONS.register("combination:two_responses")
def two_responses(text: str) -> bool:
    """The text is two different responses with ****** between them."""
    parts = _paragraphs(text, "******")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@INSTRUCTIONS.register("combination:repeat_prompt")
def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """The text begins with this prompt."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@INSTRUCTIONS.register("startend:end_checker")
def end_checker(text: str, *, end_phrase: str) -> bool:
    """The text ends with the phrase; a quotation mark may follow."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@INSTRUCTIONS.register("startend:quotation")
def quotation(text: str) -> bool:
    """Double quotation marks stand around the text."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@INSTRUCTIONS.register("change_case:capital_word_frequency")
def capital_word_frequency(text: str, *, capital_frequency: NonNegativeInt, capital_relation: Relation) -> bool:
    """So many words have capital letters only; a word with hyphens is one word."""
    return compares(sum(word.isupper() for word in WORD.findall(text)), capital_relation, capital_frequency)


@INSTRUCTIONS.register("change_case:english_capital", fault=lambda: _no_language("en"))
def english_capital(text: str) -> bool:
    """The text is English, in capital letters only."""
    return text.isupper() and language_of(text) == "en"


@INSTRUCTIONS.register("change_case:english_lowercase", fault=lambda: _no_language("en"))
def english_lowercase(text: str) -> bool:
    """The text is English, in small letters only."""
    return text.islower() and language_of(text) == "en"


@INSTRUCTIONS.register("punctuation:no_comma")
def no_comma(text: str) -> bool:
    """The text has no comma."""
    return "," not in text


@lru_cache(maxsize=4096)
def _build(text: str) -> Plugin:
    return INSTRUCTIONS.build(json.loads(text), "kwargs")


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def instructions_of(row: Mapping[str, Any]) -> list[Plugin]:
    """The instructions of a row.

    Raises:
        ValueError: there are none, the two lists have different lengths, there is no such instruction, or its arguments
            are wrong; names the instruction.
    """
    names, arguments = row["instruction_id_list"], row["kwargs"]
    if not isinstance(names, list) or not isinstance(arguments, list) or not 0 < len(names) == len(arguments):
        raise ValueError(
            "the fields 'instruction_id_list' and 'kwargs' must be lists of one length, with an entry or more; they "
            f"are {names!r:.80} and {arguments!r:.80}"
        )
    instructions = []
    for name, given in zip(names, arguments, strict=True):
        options = {option: _whole(value) for option, value in (given or {}).items() if value is not None}
        with prefixed(f"the instruction {name!r} of the row: "):
            instructions.append(_build(json.dumps({"name": name, **options})))
    return instructions


def variants(response: str) -> list[str]:
    """The texts that loose checks accept: without the first line, the last line, both, and each without asterisks."""
    lines = response.split("\n")
    parts = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [text for part in (response, *parts) for text in (part, part.replace("*", ""))]


@REWARDS.register(
    "ifeval",
    reads=("instruction_id_list", "kwargs"),
    thoughts="skip",
    gold=instructions_of,
)
def ifeval(
    response: str,
    row: Mapping[str, Any],
    *,
    mode: Literal["strict", "loose"],
    score: Literal["all", "share"],
) -> float:
    """1 where the response follows all instructions of its row, else 0; or the share of them that it follows.

    IFEval, arXiv 2311.07911, section 2.2. An empty response follows none.

    Args:
        mode: strict: the response as it is; loose: an instruction is followed if one of `variants` follows it.
        score: all: 1 or 0; share: followed instructions / instructions.
    """
    response = response.lstrip()
    texts = [text for text in (variants(response) if mode == "loose" else [response]) if text.strip()]
    followed = [any(check(text) for text in texts) for check in instructions_of(row)]
    return float(all(followed)) if score == "all" else sum(followed) / len(followed)
