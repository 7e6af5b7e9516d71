"""Is a response JSON, and valid by a JSON schema?"""

import importlib.util
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rft.data.strict_json import value_of
from rft.reward.rules.tags import bad_tag, last_block
from rft.reward.term import REWARDS, Unscored

if TYPE_CHECKING:
    from referencing import Resource

FENCE = re.compile(r"^ {0,3}```(?P<info>[^\n`]*)$", re.MULTILINE)
DIALECT = "https://json-schema.org/draft/2020-12/schema"  # of a schema that names none
TOO_DEEP = "the json schema refers to itself more often than can be followed"


def json_text(response: str, tag: str | None, fence: str) -> str | None:
    """The part of a response that shall be JSON, with the options of `json`; None where there is no such part."""
    text = last_block(response, tag)
    if text is None or fence == "never":
        return text
    block = _last_fenced(text)
    return text if block is None and fence == "optional" else block


def _last_fenced(text: str) -> str | None:
    """The lines of the last block between two lines with three backticks, of which the second has nothing else."""
    block, start = None, None
    for fence in FENCE.finditer(text):
        if start is None:
            start = fence.end() + 1
        elif not fence["info"].strip(" \t"):
            block, start = text[start : fence.start()], None
    return block


def canonical(value: Any) -> str:
    """One text for equal JSON values: keys are sorted, 1.0 is 1."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def missing_package() -> str | None:
    """The cure if the package that validates is not installed."""
    if importlib.util.find_spec("jsonschema") is None:
        return "needs the package jsonschema; pip install 'rft[json]'"
    return None


def schema_fault(schema: Any) -> str | None:
    """What is wrong with a JSON schema: it is invalid, or a reference of it leads nowhere or in a circle."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Specification
    from referencing.jsonschema import specification_with

    if not isinstance(schema, dict):
        return f"a JSON schema is an object, not {type(schema).__name__}"
    dialect, unknown = schema.get("$schema", DIALECT), Specification.OPAQUE
    specification = specification_with(dialect, unknown) if isinstance(dialect, str) else unknown
    if specification is unknown:
        return f"$schema={dialect!r:.80} is no known dialect; leave it out for draft 2020-12"
    try:
        validator_for(schema).check_schema(schema)
        dead = _dead_reference(specification.create_resource(schema))
        if dead is None:
            is_valid(None, schema)
    except SchemaError as error:
        return f"{error.message} (at {error.json_path})"
    except RecursionError:
        return "it refers to itself without end"
    return None if dead is None else f"the reference {dead!r:.80} leads nowhere; write its target into $defs"


def _dead_reference(root: "Resource[Any]") -> str | None:
    """A reference of a schema that leads nowhere, or None. Nothing is fetched."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    waiting = [(root, Registry().resolver_with_root(root))]
    while waiting:
        resource, resolver = waiting.pop()
        stated = resource.contents if isinstance(resource.contents, Mapping) else {}
        for reference in [stated[keyword] for keyword in ("$ref", "$dynamicRef") if keyword in stated]:
            try:
                resolver.lookup(reference)
            except Unresolvable:
                return str(reference)
        waiting += [(part, resolver.in_subresource(part)) for part in resource.subresources()]
    return None


def is_valid(value: Any, schema: Mapping[str, Any]) -> bool:
    """A value is valid by a schema without fault. References to other documents are not fetched.

    Raises:
        RecursionError: the schema refers to itself too often for this value.
    """
    from jsonschema.validators import validator_for
    from referencing import Registry

    return bool(validator_for(schema)(schema, registry=Registry()).is_valid(value))


def field_value(row: Mapping[str, Any], field: str) -> Any:
    """The value of a field of a row that is a list, an object, or the JSON text of one.

    Raises:
        ValueError: it is a text and not JSON; names the field.
    """
    value = row[field]
    try:
        return value_of(value, unique=True) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(
            f"the field {field!r} is not JSON ({error}): {value!r:.80}; correct or remove the row"
        ) from error


def _fault(tag: str | None, schema: dict[str, Any] | None, schema_field: str | None) -> str | None:
    if (fault := bad_tag("tag", tag)) is not None:
        return fault
    if schema is not None and schema_field is not None:
        return f"schema_field={schema_field}: there is also a schema; set one of schema and schema_field to null"
    name = "schema" if schema is not None else "schema_field"
    if schema is None and schema_field is None:
        return None
    if (fault := missing_package()) is not None:
        return f"{name} {fault}"
    fault = None if schema is None else schema_fault(schema)
    return None if fault is None else f"schema is no JSON schema: {fault}"


def _canonical(response: str, tag: str | None, fence: str) -> str | None:
    text = json_text(response, tag, fence)
    try:
        return None if text is None else canonical(value_of(text, unique=True))
    except ValueError:
        return None


def _gold(row: Mapping[str, Any], schema_field: str | None) -> None:
    fault = None if schema_field is None else schema_fault(field_value(row, schema_field))
    if fault is not None:
        raise ValueError(f"the field {schema_field!r} is no JSON schema: {fault}; write the schema as a JSON text")


def _written(
    row: Mapping[str, Any], tag: str | None, fence: str, schema: dict[str, Any] | None, schema_field: str | None
) -> list[str]:
    """The `examples` of the schema, or a value if every value is right."""
    schema_of_row = schema if schema_field is None else field_value(row, schema_field)
    values = [{"a": [1, 2.5, "b", None]}] if schema_of_row is None else schema_of_row.get("examples", [])
    texts = []
    for text in (json.dumps(value, ensure_ascii=False) for value in values):
        fenced = f"Here it is:\n```json\n{text}\n```\n"
        texts += {"never": [text], "optional": [text, fenced], "required": [fenced]}[fence]
    return texts if tag is None else [f"I write <{tag}>{text}</{tag}>" for text in texts]


@REWARDS.register(
    "json",
    reads=lambda schema_field: () if schema_field is None else (schema_field,),
    thoughts="skip",
    extract=_canonical,
    gold=_gold,
    writes=_written,
    others="any",
    fault=_fault,
)
def json_valid(
    response: str,
    row: Mapping[str, Any],
    *,
    tag: str | None,
    fence: Literal["never", "optional", "required"],
    schema: dict[str, Any] | None,
    schema_field: str | None,
) -> float | Unscored:
    """1 where the response is JSON, and valid by the schema if there is one, else 0.

    Args:
        tag: only the text in the last block of this tag; null: the response.
        fence: "optional": of this text the last block between ``` lines, if there is one; "required": a text without
            such a block has 0; "never": the whole text.
        schema: a JSON schema, of draft 2020-12 unless its $schema names another; `format` is not checked.
        schema_field: the field of the row that holds the schema, as an object or as its JSON text.

    Returns:
        Unscored if the value is nested too deeply for a schema that refers to itself.

    Raises:
        ValueError: the field of the row is not JSON.
    """
    text = json_text(response, tag, fence)
    if text is None:
        return 0.0
    try:
        value = value_of(text, unique=True)
    except ValueError:
        return 0.0
    schema_of_row = schema if schema_field is None else field_value(row, schema_field)
    try:
        return float(schema_of_row is None or is_valid(value, schema_of_row))
    except RecursionError:
        return Unscored(TOO_DEEP)
