import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rft
from rft.data.tool_calls import TOOL_CALLS, ToolCall, calls_of
from tests.data.tool_calls.table import FORMS, TEA, TOOLS, cases

TABLE = [(form, name) for form in FORMS for name in cases(FORMS[form])]
WITHOUT_OPTIONS = [name for name in TOOL_CALLS.names() if name != "mark"]
DEADLINE_S = 60.0  # of this process's own time, which other processes do not lengthen; the parsers take ten
A, B, C = (f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in "abc")


def built(name):
    return TOOL_CALLS.build({"name": name}, "k")


def hermes(text, opened=None):
    content, calls = calls_of(text, {}, built("hermes"), opened)
    return content, [call.name for call in calls]


@pytest.mark.parametrize(("form", "name"), TABLE)
def test_the_calls_of_an_answer(form, name):
    case = cases(FORMS[form])[name]
    content, calls = calls_of(case.text, TOOLS, built(FORMS[form].format), case.opened)
    assert content == case.content and len(calls) == len(case.calls)
    for call, expected in zip(calls, case.calls, strict=True):
        assert call.startswith(expected) if isinstance(expected, str) else call == expected


def test_every_format_is_in_the_table():
    assert {form.format for form in FORMS.values()} == {*WITHOUT_OPTIONS}


def test_the_page_on_environments_has_a_row_for_every_format():
    page = (Path(rft.__file__).parents[1] / "docs" / "agents.md").read_text()
    section = page.partition("## Formats of tool calls\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == TOOL_CALLS.names()


def test_thoughts_anywhere_call_nothing():
    assert hermes(f"<think>{A}</think>{B}") == (f"<think>{A}</think>", ["b"])
    assert hermes(f"Hm. <think>{A}</think> So\n[THINK]{A}[/THINK]\n{B}") == (
        f"Hm. <think>{A}</think> So\n[THINK]{A}[/THINK]", ["b"]
    )  # fmt: skip
    assert hermes(f"So {A} <think>{B}</think> {C}") == ("So", ["a", "c"])
    assert hermes(f"So {A} <think>{B} {C}") == ("So", ["a"]), "a thought behind a call that does not end"
    assert hermes(f"<think>1</think>So <think>{A}") == (f"<think>1</think>So <think>{A}", [])
    assert hermes(f"1</thinking>2</think>{A}", "<think>") == ("1</thinking>2</think>", ["a"])


def test_content_behind_a_thought_keeps_the_blanks_between_them():
    assert hermes(f"<think>\n1\n</think>\n\nI call.\n{A}") == ("<think>\n1\n</think>\n\nI call.", ["a"])
    assert hermes("<think>1</think>\n\nplain ") == ("<think>1</think>\n\nplain", [])


def test_a_call_that_is_not_closed_hides_what_follows():
    content, [reason] = calls_of(f"So <tool_call><think>{A}", {}, built("hermes"), None)
    assert content == "So" and reason.startswith("the call is no JSON")
    content, [reason] = calls_of("So <tool_call><think></think>{}", {}, built("hermes"), None)
    assert content == "So" and reason == "a <tool_call> is not closed"


def texts(form, size, second):
    """Repeated marks in front of a call, in its name and in an argument, with the rest of the call and without."""
    pieces = [
        *built(form.format).facts.marks,
        "<think>",
        "</think>",
        '{"',
        '{"name": "f", "parameters": ',
        "[",
        '"\\',
        "f.call(x=[",
        "{}",
        " ",
    ]
    whole = form.write([("find", TEA)])
    places = (0, whole.index("find") + 2, whole.index("tea") + 2)
    for piece in pieces:
        for other in pieces if second else ("",):
            repeated = (piece + other) * (size // len(piece + other))
            for place in places:
                yield whole[:place] + repeated
                yield whole[:place] + repeated + whole[place:]


def read_all(form, size, second):
    format = built(form.format)
    for text in texts(form, size, second):
        content, calls = calls_of(text, TOOLS, format, None)
        assert isinstance(content, str) and all(isinstance(call, str | ToolCall) for call in calls)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_marks_of_its_own_anywhere_raise_nothing(form):
    read_all(form, 10_000, second=False)
    read_all(form, 100, second=True)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_time_grows_with_the_length_and_not_its_square(form):
    """A parser that reads the rest of the text at every mark takes the time of 10**9 characters for each text."""

    def late(*_):
        raise AssertionError(f"{form.format} takes more than {DEADLINE_S} seconds")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, DEADLINE_S)
    try:
        read_all(form, 100_000, second=True)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_the_package_needs_neither_torch_nor_transformers():
    code = "import sys, rft.data.tool_calls; assert not {'torch', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
