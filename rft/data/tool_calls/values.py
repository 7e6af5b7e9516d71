"""Values of arguments: JSON, and texts whose type the schema of the tool states."""

from collections.abc import Mapping
from typing import Any

from rft.data.strict_json import DEEPEST, value_of

# How Python writes what JSON writes in another way. Some templates write arguments so, such as that of Qwen3.5.
PYTHON = {"True": True, "False": False, "None": None}
KINDS = {str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, list: {"array"}}
KINDS |= {dict: {"object"}, type(None): {"null"}}


def argument_value(text: str, kinds: frozenset[str] | None) -> Any:
    """The value of an argument that a format writes without its type.

    Args:
        kinds: types that the schema allows; None where it states none. A string stays the text. A text that is not
            JSON, or JSON of another type, is one where a string is allowed or no type is stated.

    Raises:
        ValueError: it is not JSON, and no string is allowed.
    """
    if kinds == {"string"}:
        return text
    textual = kinds is None or "string" in kinds
    try:
        value = value_of(text)
    except ValueError as error:
        if textual:
            return text
        if text.strip() in PYTHON:
            return PYTHON[text.strip()]
        assert kinds is not None
        raise ValueError(f"no JSON of type {' or '.join(sorted(kinds))}: {error}") from None
    return text if textual and kinds is not None and not KINDS[type(value)] & kinds else value


def properties(tools: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The schemas of the parameters of a tool by their names; empty where the tool or its parameters are unknown."""
    found = _parameters(tools, name).get("properties")
    return found if isinstance(found, dict) else {}


def parameter_kinds(tools: Mapping[str, Any], name: str, parameter: str) -> frozenset[str] | None:
    """The JSON types that the schema of a tool allows for a parameter; None where it states none."""
    return _kinds(properties(tools, name).get(parameter), _parameters(tools, name), DEEPEST)


def _parameters(tools: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = tools[name]["function"].get("parameters") if name in tools else None
    return found if isinstance(found, dict) else {}


def _kinds(schema: Any, root: Any, left: int) -> frozenset[str] | None:
    if not isinstance(schema, dict) or not left:
        return None
    stated = schema.get("type")
    found: frozenset[str] | None = None
    if isinstance(stated, str | list):
        found = frozenset([stated] if isinstance(stated, str) else map(str, stated))
    elif isinstance(schema.get("$ref"), str):
        found = _kinds(_target(schema["$ref"], root), root, left - 1)
    elif isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        found = frozenset().union(*(KINDS[type(value)] for value in values))
    elif isinstance(branches := schema.get("anyOf", schema.get("oneOf")), list):
        each = [_kinds(branch, root, left - 1) for branch in branches]
        found = None if None in each else frozenset().union(*(kinds for kinds in each if kinds))
    elif isinstance(schema.get("allOf"), list):
        each = [_kinds(branch, root, left - 1) for branch in schema["allOf"]]
        found = next((kinds for kinds in each if kinds), None)
    return found | {"null"} if found and schema.get("nullable") is True else found


def _target(reference: str, root: Any) -> Any:
    """The schema that a reference within the schema of the parameters names; None if there is none."""
    start, *path = reference.split("/")
    for step in path if start == "#" else [""]:
        root = root.get(step) if isinstance(root, dict) else None
    return root
