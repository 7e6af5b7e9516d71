"""Names and texts from outside, as metrics and a terminal take them."""

import logging
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.batch.scores import spell_reason
from rft.sanitize import (
    LONGEST_NAME,
    MOST_NAMES,
    SHOWN,
    Names,
    check_metric_name,
    one_line,
    printable,
    spell_name,
    valid_text,
    warn_once,
)

TEXTS = st.text(st.characters(), max_size=80) | st.sampled_from(
    ["[/b]", "../x", "a//b", "unscored/x", "a_stderr", "\ud800"]
)


@settings(max_examples=100, deadline=None)
@given(TEXTS, TEXTS)
def test_a_spelled_name_is_safe_and_those_of_different_names_differ(one, other):
    spelled = spell_name(one)
    assert re.fullmatch(r"[\w.+@% /-]{1,64}", spelled) and spell_name(spelled) == spelled
    assert not spelled.startswith(("unscored/", "/", " ")) and not spelled.endswith(("_stderr", "/", " "))
    assert spelled != "unscored" and not {"", ".", ".."} & {*spelled.split("/")}
    assert one == other or spelled != spell_name(other)


@pytest.mark.parametrize(
    "name", ["letters", "acc/strict", "pass@1", "a b", "openai/gsm8k", "größe", "x-y.z", "9", "v2+"]
)
def test_names_that_metrics_can_have_stay(name):
    assert spell_name(name) == name


def test_other_names_end_with_the_checksum_of_what_they_were():
    assert spell_name("a\nb") == "a_b_ef0790fb" and spell_name("../../x") == "x_422533a8"
    assert spell_name("") == "name_00000000" and len(spell_name("x" * 10**6)) == LONGEST_NAME


def test_an_origin_has_few_names_and_the_others_are_said_once(caplog):
    warn_once.cache_clear()
    names = Names("further numbers of the test", frozenset({"deadline"}))
    with caplog.at_level(logging.WARNING):
        found = [names.spell(f"n{number}") for number in range(300)]
        assert found == [f"n{number}" for number in range(MOST_NAMES)] + [None] * (300 - MOST_NAMES)
        assert names.spell("n0") == "n0" and names.spell("deadline") == "deadline"
        changed = Names("other numbers of the test")
        assert [changed.spell(name) for name in ("a\x1b", "a\x1b", "b\n")] == [spell_name("a\x1b")] * 2 + [
            spell_name("b\n")
        ]
    assert caplog.messages == [
        "further numbers of the test: there are more than 64 names; metrics have only the first",
        "other numbers of the test: names that metrics cannot have are changed, 'a ' is 'a_b75a81f5'",
    ]


@settings(max_examples=50, deadline=None)
@given(TEXTS)
def test_texts_for_a_terminal_have_nothing_that_it_interprets(text):
    assert one_line(text).isprintable() and len(one_line(text)) == len(text)
    assert printable(text).replace("\n", "").replace("\t", "").isprintable()
    assert 1 <= len(spell_reason(text)) <= LONGEST_NAME


def test_texts_are_cut_and_their_line_breaks_kept_where_several_lines_are_meant():
    assert one_line("a\x1b[2J\n\u202eb") == "a [2J  b" and len(one_line("x" * 10**5)) == SHOWN
    assert printable("1. a\n\t2. \x1b[31mb\u2028") == "1. a\n\t2.  [31mb "


@pytest.mark.parametrize("name", ["a/b", "[/b]", "x_stderr", "", "a\n", "x" * 65])
def test_a_name_of_the_yaml_that_no_metric_can_have_is_refused(name):
    check_metric_name("held out", "data.eval")
    with pytest.raises(ValueError, match=r"^data\.eval: .*rename it$"):
        check_metric_name(name, "data.eval")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.characters(codec=None, categories=("Cs", "L", "So")), max_size=4), max_size=3))
def test_texts_with_halves_of_characters_become_valid(texts):
    found = valid_text({"a": texts, **dict.fromkeys(texts, 1.5)}, "the test")
    assert [text.encode() for text in (*found["a"], *found)]
    for text, now in zip(texts, found["a"], strict=True):
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert now == whole and (now == text or "\ufffd" in now or len(now) < len(text))


def test_a_half_is_replaced_and_two_halves_are_joined():
    assert valid_text(["\ud800a", "\ud83d\ude00", "b", 3, None], "x") == ["\ufffda", "\U0001f600", "b", 3, None]
