"""Formats of Llama 3: a whole answer that is JSON, and calls of built-in tools in Python's syntax."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from rft.data.strict_json import after_blanks, value_at, value_of
from rft.data.tool_calls.base import TOOL_CALLS, Found, Schema, ToolCall, call_of

TAG = "<|python_tag|>"
KEYS = ("parameters", "arguments")
NAMED = re.compile(r'\{\s*"name"\s*:')
JSON_WORDS = {"true": True, "false": False, "null": None}
# What `ast.parse` raises beside SyntaxError: for null bytes, and for expressions that are nested too deeply.
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError, SystemError)


@TOOL_CALLS.register("llama_json", marks=(TAG,), openings=("{",))
def llama_json(text: str, tools: Mapping[str, Schema]) -> Found:
    """A whole answer `{"name": ..., "parameters": {...}}`, or several with `;` between them.

    An object without a `name`, or with neither `parameters` nor the name of a tool, is an answer in JSON and no call.
    """
    answer = text.strip().removeprefix(TAG).strip()
    if not answer.startswith("{"):
        return text.strip(), []
    calls: list[ToolCall | str] = []
    place = 0
    while place < len(answer):
        try:
            value, place = value_at(answer, place)
        except ValueError as error:
            if calls or NAMED.match(answer):
                return "", [*calls, f"the call is no JSON ({error})"]
            return text.strip(), []
        if not calls and not _calls(value, tools):
            return text.strip(), []
        calls.append(call_of(value, KEYS))
        place = after_blanks(answer, place)
        if place < len(answer) and answer[place] != ";":
            return "", [*calls, "behind a call stands a text that is no call"]
        place += 1
    return "", calls


def _calls(value: Any, tools: Mapping[str, Schema]) -> bool:
    named = isinstance(value, dict) and isinstance(value.get("name"), str)
    return named and (value["name"] in tools or any(key in value for key in KEYS))


@TOOL_CALLS.register("llama_python", marks=(TAG,), openings=(TAG,))
def llama_python(text: str, tools: Mapping[str, Schema]) -> Found:
    """`<|python_tag|>name.call(argument="...", ...)`: calls of built-in tools, several with `;` or in lines.

    Arguments are literals: texts, numbers, `True`, `False`, `None`, lists and dicts. Nothing is evaluated.
    """
    content, tagged, code = text.partition(TAG)
    return content.strip(), _python_calls(code.strip()) if tagged else []


def _python_calls(code: str) -> list[ToolCall | str]:
    try:
        statements = ast.parse(code).body
    except UNREADABLE as error:
        return [f"the call is no Python ({error})"]
    return [_python_call(statement) for statement in statements] or [f"behind {TAG} stands no call"]


def _python_call(statement: ast.stmt) -> ToolCall | str:
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "call"), [], keywords)):
            try:
                arguments = {_name(keyword): _literal(keyword.value) for keyword in keywords}
                return ToolCall(name, value_of(json.dumps(arguments)))  # with the limits of JSON
            except ValueError as error:
                return f"the arguments of {name}.call are no literals with names ({error})"
    return f"behind {TAG} stands no call name.call(argument=...)"


def _name(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("** in front of one")
    return keyword.arg


def _literal(node: ast.expr) -> Any:
    """The JSON value of a literal. Python allows 200 levels of brackets, so that the recursion ends.

    Raises:
        ValueError: it is none.
    """
    match node:
        case ast.Constant(str() | int() | float() | None as constant):
            return constant
        case ast.Name(word) if word in JSON_WORDS:
            return JSON_WORDS[word]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return -number
        case ast.List(items):
            return [_literal(item) for item in items]
        case ast.Dict(keys, values):
            found = {}
            for key, value in zip(keys, values, strict=True):
                if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                    raise ValueError("the keys of a dict are no texts")
                found[key.value] = _literal(value)
            return found
    raise ValueError(f"a value is a {type(node).__name__}")
