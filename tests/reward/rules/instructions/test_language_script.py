"""The share of letters of a script, counted by hand."""

import pytest

from rft.registry import Plugin
from rft.reward import REWARDS
from rft.reward.rules.instructions.language import script_of


def rule(*scripts: str, without_letters: float = 0.0) -> Plugin:
    node = {"name": "script", "scripts": list(scripts), "without_letters": without_letters}
    return REWARDS.build(node, "reward.terms.script")


@pytest.mark.parametrize(
    ("letter", "script"),
    [
        ("a", "latin"),
        ("É", "latin"),
        ("\uff21", "latin"),  # full width A
        ("\ufb03", "latin"),  # the ligature ffi
        ("\U0001d431", "latin"),  # bold x of formulas
        ("中", "han"),
        ("々", "han"),
        ("\uf900", "han"),
        ("ж", "cyrillic"),
        ("π", "greek"),
        ("\u00b5", "greek"),  # the micro sign
        ("ひ", "hiragana"),
        ("カ", "katakana"),
        ("\u30fc", "katakana"),  # the mark of a long vowel
        ("\uff76", "katakana"),  # half width
        ("한", "hangul"),
        ("ع", "arabic"),
        ("ש", "hebrew"),
        ("ह", "devanagari"),
        ("ไ", "thai"),
        ("ა", "georgian"),
        ("1", None),
        (" ", None),
        ("\uff0c", None),
        ("+", None),
        ("\u0301", None),  # a combining accent
        ("\u02c8", None),  # the stress of phonetic writing
        ("\ue000", None),
        ("\ud800", None),
    ],
)
def test_the_script_of_a_character(letter: str, script: str | None) -> None:
    assert script_of(letter) == script


@pytest.mark.parametrize(
    ("response", "scripts", "share"),
    [
        ("It is 4.", ["latin"], 1.0),
        ("It is 四.", ["latin"], 4 / 5),
        ("It is 四.", ["han"], 1 / 5),
        ("It is 四.", ["han", "latin"], 1.0),
        ("答案是 x = 4", ["han"], 3 / 4),
        ("да", ["latin"], 0.0),
        ("カタひら", ["hiragana"], 1 / 2),
    ],
)
def test_shares(response: str, scripts: list[str], share: float) -> None:
    assert rule(*scripts)(response, {}) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("response", ["", "2 + 2 = 4", " \n"])
def test_a_response_without_a_letter_has_the_value_of_the_yaml(response: str) -> None:
    assert rule("latin")(response, {}) == 0.0
    assert rule("latin", without_letters=1.0)(response, {}) == 1.0


@pytest.mark.parametrize(
    ("scripts", "message"),
    [([], r"scripts: \[\] names no script"), (["english"], r"scripts\[0\]: expected one of latin, han, ")],
)
def test_scripts_that_are_none(scripts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^reward\.terms\.script\.{message}"):
        rule(*scripts)
