"""What a worker in the sandbox answers, as JSON: the run reads values, and no object that could execute code."""

import json
from collections.abc import Mapping
from typing import Any

from rft.reward.failure import Failure
from rft.reward.term import Unscored
from rft.sanitize import one_line


def encode(found: Any) -> bytes:
    """The answer of a worker: what a term returned for the responses of a call, or a `Failure`."""
    return json.dumps(_plain(found)).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Failure):
        return {"failure": [value.reason, value.message]}
    if isinstance(value, Unscored):
        return {"unscored": value.reason}
    if isinstance(value, Mapping):
        return {"numbers": {str(name): _number(one) for name, one in value.items()}}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return _number(value)


def _number(value: Any) -> Any:
    """A number of python, numpy or torch; None for what the run does not accept as a score either."""
    if isinstance(value, bool | int | float):
        return value
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def decode(answer: bytes) -> Any:
    """What the term returned: a value or a list of values, or a `Failure` if the answer is malformed.

    A worker may write anything.
    """
    try:
        return _value(json.loads(answer), lists=True)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        return Failure("bad_answer", f"the worker answered with what is no score: {one_line(str(error))}")


def _value(value: Any, lists: bool) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list) and lists:
        return [_value(one, lists=False) for one in value]
    ((kind, content),) = value.items()
    if kind == "numbers":
        return {name: _value(one, lists=False) for name, one in content.items()}
    if kind == "unscored":
        return Unscored(one_line(content))
    if kind == "failure":
        reason, message = map(one_line, content)
        return Failure(reason, message)
    raise ValueError(f"an answer of the kind {kind!r}")
