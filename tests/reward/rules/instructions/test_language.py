"""The language of a response, given or that of its prompt."""

import importlib.util
import time

import pytest

from rft.reward import REWARDS

TEXTS = {
    "en": "The weather is nice today, and we are going into the garden.",
    "de": "Das Wetter ist heute schön, und wir gehen in den Garten.",
    "fr": "Il fait beau aujourd'hui et nous allons dans le jardin.",
    "es": "Hoy hace buen tiempo y vamos a salir al jardín.",
    "ru": "Сегодня хорошая погода, и мы идём в сад.",
    "zh": "今天天气很好我们去花园里散步。",
    "hi": "आज मौसम अच्छा है और हम बगीचे में जा रहे हैं।",
}


def term(language=None, score="all", without_letters=0.0):
    node = {"name": "language", "language": language, "score": score, "without_letters": without_letters}
    return REWARDS.build(node, "reward.terms.language")


@pytest.mark.parametrize("code", TEXTS)
def test_a_given_language(code):
    assert {other: term(code)(text, {}) for other, text in TEXTS.items()} == {other: other == code for other in TEXTS}
    assert term(code).facts.reads == ()


def test_the_language_of_the_prompt():
    rule = term()
    assert rule.facts.reads == ("prompt",)
    assert rule(TEXTS["de"], {"prompt": "Wie ist das Wetter heute, und wohin gehen wir?"}) == 1.0
    assert rule(TEXTS["en"], {"prompt": "Wie ist das Wetter heute, und wohin gehen wir?"}) == 0.0
    chat = [{"role": "system", "content": TEXTS["en"]}, {"role": "user", "content": TEXTS["en"]}]
    parts = [{"type": "text", "text": TEXTS["fr"]}]
    chat += [{"role": "assistant", "content": TEXTS["en"]}, {"role": "user", "content": parts}]
    assert rule(TEXTS["fr"], {"prompt": chat}) == 1.0, "the last message of the user"
    chat[-1]["content"] = [{"type": "image", "image": "/a.png"}, *parts]
    assert rule(TEXTS["fr"], {"prompt": chat}) == 1.0
    for prompt in ("12+7=", "$x^2$", [{"role": "system", "content": "Hello there"}]):
        with pytest.raises(ValueError, match=r"has no words, so it is in no language; set the term's language"):
            rule.call("gold", {"prompt": prompt})


def test_the_share_of_the_letters_in_paragraphs_of_the_language():
    english, german = TEXTS["en"], TEXTS["de"]
    letters = [sum(map(str.isalpha, text)) for text in (english, german)]
    assert letters == [47, 44]
    assert term("de", "share")(f"{english}\n \n{german}\n\n123", {}) == pytest.approx(44 / 91)
    assert term("de", "all")(f"{german} {german}\n\n{english}", {}) == 1.0, "the whole text is mostly German"


def test_code_and_formulas_are_in_no_language():
    code = "\n".join(["```python", *["for the_number in the_list_of_numbers: return this_is_the_answer"] * 9, "```"])
    formula = r"$$\text{the sum of all the numbers that are in the list}$$ and \(\frac{the}{these}\)"
    for extra in (code, formula, code.removesuffix("```")):
        assert term("de", "share")(f"{TEXTS['de']}\n\n{extra}", {}) >= 44 / 47
    assert term("de", without_letters=0.5)("$x$ 42\n```\nx = y\n```", {}) == 0.5


@pytest.mark.parametrize("unit", ["\\[", "\\(", "$", "$$", "```\n", "$x", "\n", " "])
def test_no_text_takes_long(unit):
    start = time.process_time()
    term("en")(f"x{unit * (100_000 // len(unit))}x", {})
    assert time.process_time() - start < 5


def test_an_unknown_code_and_a_missing_package(monkeypatch):
    with pytest.raises(ValueError, match=r"^reward\.terms\.language\.language=english: 'english' is no code of a"):
        term("english")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "py3langid" else find(name))
    with pytest.raises(ValueError, match=r'\.language=null: identifying .* py3langid: pip install "rft\[language\]"$'):
        term()
