r"""Is the final answer of a response mathematically equal to that of the row? math-verify reads the formulas."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any

from rft.ranges import Range
from rft.reward.rules.gsm8k import GOLD_MARKER
from rft.reward.rules.math_check.answer import Place, Unreadable, boxed, final_answer, seen
from rft.reward.rules.math_check.equal import Comparison, canonical, checked
from rft.reward.rules.math_check.formula import Failed, installed
from rft.reward.rules.math_check.parse import Answer, readings
from rft.reward.term import REWARDS, Unscored


def _fault(extract_from: list[Place], markers: list[str]) -> str | None:
    if not extract_from or len({*extract_from}) < len(extract_from):
        return f"extract_from={extract_from}: name each place once; write [boxed, markers, last]"
    if not all(markers) or ("markers" in extract_from and not markers):
        return f"markers: {markers!r} gives no text to look for; write ['{GOLD_MARKER}', 'answer is']"
    if not installed():
        return 'name=math needs the package math-verify: pip install "rft[math]"'
    return None


def _extract(response: str, extract_from: list[Place], markers: list[str], percent_as_unit: bool) -> str | None:
    answer = final_answer(response, extract_from, markers)
    if answer is None:
        return None
    try:
        return canonical(readings(answer, True)[0], percent_as_unit)
    except Unreadable:
        return None


def _gold_text(answer: Any) -> str:
    text = seen(str(answer))
    boxes = list(boxed(text))
    if not boxes:
        return text.rpartition(GOLD_MARKER)[2]
    if len({"".join(box.split()) for box in boxes}) > 1:
        raise ValueError(
            rf"the field 'answer' holds more than one \boxed{{}}: {boxes[-1]!r:.80} and {boxes[0]!r:.80}; leave the "
            "final answer in a box, join the boxes with 'and', or remove the row"
        )
    return boxes[0]


@lru_cache(maxsize=4096)
def _gold_readings(text: str) -> tuple[Answer, ...]:
    gold = _gold_text(text)
    try:
        answers = readings(gold.strip())
        for answer in answers:
            checked(answer)
    except Unreadable as error:
        raise ValueError(
            f"the field 'answer' cannot be parsed, as {error}: {gold[:80]!r}; write a number, LaTeX or a few words, "
            "or remove the row"
        ) from error
    return answers


def _gold(row: Mapping[str, Any]) -> tuple[Answer, ...]:
    answer = row["answer"]
    if (
        isinstance(answer, bool | list | dict)
        or answer is None
        or (isinstance(answer, float) and not math.isfinite(answer))
    ):
        raise ValueError(f"the field 'answer' is {answer!r:.80}, which is no answer; write a text or a number")
    return _gold_readings(str(answer))


def _written(row: Mapping[str, Any], extract_from: list[Place], markers: list[str]) -> list[str]:
    """The gold answer in each place where an answer is looked for, and after a thought with another one."""
    gold = " ".join(_gold_text(row["answer"]).split())
    gold = gold.rstrip("\\ ")  # behind a backslash, of a space or line break, a brace closes nothing
    formula = gold if "$" in gold else f"${gold}$"
    places = {
        "boxed": [rf"\boxed{{{gold}}}", rf"Hence $x + 1$ and $\boxed{{{gold}}}$."],
        "markers": [*(f"{marker} {gold}" for marker in markers), *(f"So {marker} {formula}." for marker in markers)],
        "last": [f"Hence\n{formula}"],
    }
    texts = [text for place in extract_from for text in places[place]]
    return [*texts, rf"<think>\boxed{{-77.5}} or {markers[0] if markers else ''} 8</think>{texts[0]}"]


@REWARDS.register(
    "math", reads=("answer",), thoughts="skip", fault=_fault, extract=_extract, gold=_gold, writes=_written
)
def math_answer(
    response: str,
    row: Mapping[str, Any],
    *,
    extract_from: list[Place],
    markers: list[str],
    float_rounding: Annotated[int, Range(low=0, high=15)],
    percent_as_unit: bool,
) -> float | Unscored:
    r"""1 where the final answer of the response equals the row's `answer`, else 0.

    The `answer` is in LaTeX or plain text; of a solution that holds a \boxed{} or #### it is what stands there.

    The first place of `extract_from` that the response has decides. Of several \boxed{} the last counts, or the last
    ones that are one answer, see `answer.boxed`. One that is empty or not closed is no answer.

    A response without an answer, or whose answer math-verify cannot parse, is wrong: 0. So is one whose answer has no
    value, such as (-1)!, has more than 1000 characters, an unsolved integral, or a number of more than 10000 digits,
    such as 9^{9^{9}}; a gold answer of this kind is refused. So a response gains nothing by an answer that cannot be
    read. If both answers are read and their comparison raises an error, the result is `Unscored`. A comparison may take
    long: it needs a deadline from outside.

    Args:
        extract_from: where the answer is looked for, the more trusted first: the last "boxed"; behind the last of the
            first of the "markers" that is there; the "last" formula or number. [boxed] accepts no other answer.
        markers: what stands before the answer, in any case, the more trusted first.
        float_rounding: places to which a decimal must equal a number; below 0.1 zeros behind the point do not count.
        percent_as_unit: 50% equals 50 as well as 0.5, as data sets leave out the sign.

    Raises:
        ValueError: the row's `answer` cannot be parsed, or has different boxes with other words between them.
    """
    gold = _gold(row)
    answer = final_answer(response, extract_from, markers)
    if answer is None:
        return 0.0
    compare = Comparison(float_rounding, percent_as_unit)
    try:
        return float(any(compare.equal(this, that) for that in readings(answer, True) for this in gold))
    except Unreadable:
        return 0.0
    except Failed as error:
        return Unscored(f"math-verify failed on the answers: {error}")
