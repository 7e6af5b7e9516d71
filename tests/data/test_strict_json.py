"""Which texts are JSON within the limits, and what is wrong with the others."""

import re

import pytest

from rft.data.strict_json import value_at, value_of

TWICE = '{"a": [{"b": 1, "b": 2}]}'


def test_a_value_ends_where_its_text_does():
    assert value_at("a: \n[1, 2] and more", 2) == ([1, 2], 10)
    assert value_at('{"a": "\\ud83d\\ude00", "b": 1.5e3}') == ({"a": "😀", "b": 1500.0}, 33)
    assert value_of(" 3\r\n\t") == 3 and value_of("9" * 309) == int("9" * 309)


def test_64_levels_are_read_and_brackets_in_a_text_are_none():
    deep = "[" * 64 + "]" * 64
    assert str(value_of(deep)) == deep
    assert value_of(f'["{"[" * 70}", {", ".join(["{}"] * 70)}]') == ["[" * 70, *[{}] * 70]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("\u00a0{}", "Expecting value"),
        ("{} {}", "Extra data: line 1 column 4 (char 3)"),
        ("1\u00a0", "Extra data: line 1 column 2"),
        ("1e999", "1e999 is beyond float64"),
        ("[-Infinity]", "-Infinity is no number"),
        ("[NaN]", "NaN is no number"),
        ("9" * 5_000, "Exceeds the limit"),
        ("[" * 65 + "]" * 65, "lists and objects are nested more than 64 levels deep; write it flatter"),
        ('{"a": ' * 65 + "1" + "}" * 65, "lists and objects are nested more than 64 levels deep"),
        ("[" * 100_000, "lists and objects are nested more than 64 levels deep"),
        (r'"\udc00\ud83d"', r"half of a surrogate pair, \udc00, is no character; write the text in UTF-8"),
        (r'{"\ud83d": 1}', r"half of a surrogate pair, \ud83d, is no character"),
    ],
)
def test_what_is_no_json(text, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        value_of(text)


def test_limits_that_only_some_texts_have():
    assert value_of(TWICE) == {"a": [{"b": 2}]}
    with pytest.raises(ValueError, match=r"^the key 'b' occurs twice in one object; remove one$"):
        value_of(TWICE, unique=True)
    assert str(value_at("[NaN, 1e999]", finite=False)[0]) == "[nan, inf]"
    assert value_at("-123", digits=3) == (-123, 4)
    with pytest.raises(ValueError, match=r"^a number of 4 digits; write it as a text$"):
        value_at("-1234", digits=3)
