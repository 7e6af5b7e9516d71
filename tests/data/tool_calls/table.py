# ruff: noqa: RUF001  (bars of DeepSeek)
"""Answers in every format of tool calls, and the calls that they have, written by hand."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rft.data.tool_calls import ToolCall

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call of `find`: their JSON text, the text of each without its type, in Python, and the
    values."""

    json: str
    texts: Pairs
    python: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Form:
    """A form of calls.

    Attributes:
        format: of `TOOL_CALLS`.
        write: the text of calls.
        opening: a mark of the form, which an argument quotes.
        cut: how the reason begins that a call which is cut gives.
        think: the marks around thoughts.
        whole: all calls are one JSON or Python text, so that a cut leaves none of them.
    """

    format: str
    write: Callable[[list[tuple[str, Arguments]]], str]
    opening: str
    cut: str
    think: tuple[str, str] = ("<think>", "</think>")
    whole: bool = False


@dataclass(frozen=True)
class Case:
    """An answer and what is read of it.

    Attributes:
        text: of the answer.
        content, calls: as `calls_of` returns them; in the place of a reason stands its beginning.
        opened: the mark of the thought that the prompt opened.
        thinks: it has thoughts.
    """

    text: str
    content: str
    calls: list[ToolCall | str]
    opened: str | None = None
    thinks: bool = False


def schema(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


FIND = {
    "query": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "deep": {"type": "boolean"},
    "fresh": {"type": "boolean"},
    "nothing": {"type": "null"},
    "filter": {"type": "object"},
    "tags": {"type": "array"},
}
TOOLS = {"find": schema("find", FIND), "look": schema("look", {})}

# Values that a form writes without their types: the schema of the parameter, the text, and the value by hand. The type
# stands for a call that cannot be read.
STRING, NUMBER = {"type": "string"}, {"type": "number"}
SOME = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
UNTYPED: list[tuple[dict[str, Any], str, Any]] = [
    (STRING, "null", "null"),
    (STRING, "True", "True"),
    (STRING, "12", "12"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": "string", "nullable": True}, "null", None),
    (SOME, "12", 12),
    (SOME, "x", "x"),
    (SOME, '{"a": 1}', '{"a": 1}'),
    ({"type": "integer"}, "3", 3),
    ({"type": "integer"}, "x", str),
    (NUMBER, "3", 3),
    (NUMBER, "0.5", 0.5),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "yes", str),
    ({"type": "object"}, "{'a': 1}", str),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({}, "12", 12),
    ({}, "x", "x"),
]

ARGUMENTS = {
    "one call": Arguments('{"query": "tea"}', [("query", "tea")], 'query="tea"', {"query": "tea"}),
    "unicode": Arguments(
        '{"query": "чай \\u2615 茶"}', [("query", "чай ☕ 茶")], 'query="чай \\u2615 茶"', {"query": "чай ☕ 茶"}
    ),
    "nested objects": Arguments(
        '{"filter": {"price": {"max": 5}, "of": ["a", ["b"]]}, "tags": [[], {}]}',
        [("filter", '{"price": {"max": 5}, "of": ["a", ["b"]]}'), ("tags", "[[], {}]")],
        'filter={"price": {"max": 5}, "of": ["a", ["b"]]}, tags=[[], {}]',
        {"filter": {"price": {"max": 5}, "of": ["a", ["b"]]}, "tags": [[], {}]},
    ),
    "numbers": Arguments(
        '{"count": 3, "ratio": -2.5e-3}',
        [("count", "3"), ("ratio", "-2.5e-3")],
        "count=3, ratio=-2.5e-3",
        {"count": 3, "ratio": -0.0025},
    ),
    "digits of a text": Arguments('{"query": "12"}', [("query", "12")], "query='12'", {"query": "12"}),
    "booleans": Arguments(
        '{"deep": true, "fresh": false}',
        [("deep", "true"), ("fresh", "false")],
        "deep=True, fresh=false",
        {"deep": True, "fresh": False},
    ),
    "null": Arguments('{"nothing": null}', [("nothing", "null")], "nothing=None", {"nothing": None}),
    "quotes and line breaks": Arguments(
        '{"query": "say \\"hi\\"\\nand \'bye\' \\\\"}',
        [("query", "say \"hi\"\nand 'bye' \\")],
        "query='say \"hi\"\\nand \\'bye\\' \\\\'",
        {"query": "say \"hi\"\nand 'bye' \\"},
    ),
}
TEA, NONE = ARGUMENTS["one call"], Arguments("{}", [], "", {})
FOUND, LOOKED = ToolCall("find", {"query": "tea"}), ToolCall("look", {})


def _hermes(calls: list[tuple[str, Arguments]]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a.json}}}\n</tool_call>' for n, a in calls)


def _qwen(calls: list[tuple[str, Arguments]]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.texts)
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _glm(calls: list[tuple[str, Arguments]]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in arguments.texts)
        + "</tool_call>"
        for name, arguments in calls
    )


def _llama(calls: list[tuple[str, Arguments]]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {arguments.json}}}' for name, arguments in calls)


def _python(calls: list[tuple[str, Arguments]]) -> str:
    return f"<|python_tag|>{'; '.join(f'{name}.call({arguments.python})' for name, arguments in calls)}"


def _mistral_list(calls: list[tuple[str, Arguments]]) -> str:
    items = ", ".join(f'{{"name": "{name}", "arguments": {arguments.json}}}' for name, arguments in calls)
    return f"[TOOL_CALLS] [{items}]"


def _mistral(calls: list[tuple[str, Arguments]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments.json}" for name, arguments in calls)


def _deepseek(calls: list[tuple[str, Arguments]]) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments.json}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def _deepseek_new(calls: list[tuple[str, Arguments]]) -> str:
    texts = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{a.json}<｜tool▁call▁end｜>" for name, a in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def _harmony(calls: list[tuple[str, Arguments]]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments.json}<|call|>"
        for name, arguments in calls
    )


def _kimi(calls: list[tuple[str, Arguments]]) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments.json}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def untyped(form: str) -> Iterator[tuple[str, dict[str, dict[str, Any]], str, Any]]:
    """Each of `UNTYPED` as a call of `f` with the argument `x`: a name of it, the tools, the text and the value."""
    for parameter, text, value in UNTYPED:
        call = FORMS[form].write([("f", Arguments("", [("x", text)], "", {}))])
        yield f"{text} of {json.dumps(parameter)}", {"f": schema("f", {"x": parameter})}, call, value


BRACKETS = ("[THINK]", "[/THINK]")
FORMS = {
    "hermes": Form("hermes", _hermes, "<tool_call>", "a <tool_call> is not closed"),
    "qwen_xml": Form("qwen_xml", _qwen, "<tool_call>", "a <tool_call> is not closed"),
    "glm": Form("glm", _glm, "<tool_call>", "a <tool_call> is not closed"),
    "llama_json": Form("llama_json", _llama, '{\\"name\\": \\"look\\"', "the call is no JSON (Unterminated string"),
    "llama_python": Form(
        "llama_python", _python, "<|python_tag|>", "the call is no Python (unterminated string", whole=True
    ),
    "mistral list": Form("mistral", _mistral_list, "[TOOL_CALLS]", "the call is no JSON (Unterminated", BRACKETS, True),
    "mistral": Form("mistral", _mistral, "[TOOL_CALLS]", "the call is no JSON (Unterminated string", BRACKETS),
    "deepseek": Form("deepseek", _deepseek, "<｜tool▁calls▁begin｜>", "a <｜tool▁call▁begin｜> is not closed"),
    "deepseek 3.1": Form("deepseek", _deepseek_new, "<｜tool▁calls▁begin｜>", "a <｜tool▁call▁begin｜> is not closed"),
    "harmony": Form("harmony", _harmony, "<|channel|>", "the call of find is not closed"),
    "kimi": Form("kimi_k2", _kimi, "<|tool_calls_section_begin|>", "a <|tool_call_begin|> is not closed"),
}


def cases(form: Form) -> dict[str, Case]:
    """The answers in a form, by what they show."""
    write, (opening, closing) = form.write, form.think
    tea, look = write([("find", TEA)]), write([("look", NONE)])
    found = {name: Case(write([("find", a)]), "", [ToolCall("find", a.values)]) for name, a in ARGUMENTS.items()}
    quoted = form.opening.replace('\\"', '"')
    marked = Arguments(
        f'{{"query": "a {form.opening} b"}}',
        [("query", f"a {quoted} b")],
        f'query="a {form.opening} b"',
        {"query": f"a {quoted} b"},
    )
    thought = Arguments(f'{{"query": "{opening}"}}', [("query", opening)], f'query="{opening}"', {"query": opening})
    found |= {
        "no arguments": Case(look, "", [LOOKED]),
        "parallel": Case(write([("find", TEA), ("look", NONE), ("find", TEA)]), "", [FOUND, LOOKED, FOUND]),
        "an opening mark in an argument": Case(
            write([("find", marked), ("look", NONE)]), "", [ToolCall("find", marked.values), LOOKED]
        ),
        "a mark of thoughts in an argument": Case(write([("find", thought)]), "", [ToolCall("find", thought.values)]),
        "cut in the middle": Case(tea[: tea.index("tea") + 2], "", [form.cut]),
        "cut in the second call": Case(
            (both := write([("look", NONE), ("find", TEA)]))[: both.index("tea") + 2],
            "",
            [form.cut] if form.whole else [LOOKED, form.cut],
        ),
    }
    return found | (of_channels(tea) if form.format == "harmony" else of_thoughts(form, tea, look, opening, closing))


def of_thoughts(form: Form, tea: str, look: str, opening: str, closing: str) -> dict[str, Case]:
    whole = form.format == "llama_json"  # the call is the whole answer
    before = (
        Case(f"I look.\n\n{tea}", f"I look.\n\n{tea}", []) if whole else Case(f"I look.\n\n{tea}", "I look.", [FOUND])
    )
    thought, no = f"{look}\n{closing}", f"{look}\n{closing}\n\nNo."
    return {
        "text before the call": before,
        "inside of a thought": Case(f"{opening}\n{no}", f"{opening}\n{no}", [], None, True),
        "behind a thought": Case(f"{opening}\n{thought}\n\n{tea}", f"{opening}\n{thought}", [FOUND], None, True),
        "in a thought that does not end": Case(f"{opening}\n{tea}", f"{opening}\n{tea}", [], None, True),
        "in a thought that the prompt opened": Case(no, no, [], opening, True),
        "behind a thought that the prompt opened": Case(f"{thought}\n\n{tea}", thought, [FOUND], opening, True),
        "in a thought of the prompt that does not end": Case(tea, tea, [], opening, True),
    }


def of_channels(tea: str) -> dict[str, Case]:
    draft = 'I write to=functions.look {"a": 1}'
    thought = f"<|channel|>analysis<|message|>{draft}<|end|><|start|>assistant"
    said = f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{tea}"
    first = ' to=functions.find<|channel|>commentary json<|message|>{"query": "tea"}<|call|>'
    return {
        "text before the call": Case(said, "I look.", [FOUND]),
        "inside of a thought": Case(f"{thought}<|channel|>final<|message|>No.<|return|>", "No.", []),
        "behind a thought": Case(f"{thought}{tea}", draft, [FOUND]),
        "in a thought that does not end": Case(f"<|channel|>analysis<|message|>{draft}", draft, []),
        "the recipient first": Case(first, "", [FOUND]),
    }
