"""What a worker in the sandbox answers, as JSON: the run reads values, and no object that could execute code."""

import builtins
import json
from collections.abc import Mapping
from typing import Any

from rft.reward.failure import Failure
from rft.reward.term import Unscored

NAMES = 50  # different reasons, and names of numbers, of one term: the run makes a metric of each
SHOWN = 2000  # characters of a message
OTHER = "other"


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


class AnswerReader:
    """Reads the answers of the workers of one term. A worker may write anything.

    Args:
        known: reasons that the run itself gives.
    """

    def __init__(self, known: tuple[str, ...]) -> None:
        builtin = [name for name, value in vars(builtins).items() if isinstance(value, type)]
        self._known = {"score", *known, *builtin}
        self._new: set[str] = set()

    def read(self, answer: bytes) -> Any:
        """What the term returned: a value or a list of values, or a `Failure` if the answer is malformed."""
        try:
            return self._value(json.loads(answer), lists=True)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            return Failure("bad_answer", f"the worker answered with what is no score: {clean(str(error))}")

    def _value(self, value: Any, lists: bool) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, list) and lists:
            return [self._value(one, lists=False) for one in value]
        ((kind, content),) = value.items()
        if kind == "numbers":
            return {name: self._value(one, lists=False) for name, one in content.items() if self._name(name) == name}
        if kind == "unscored":
            return Unscored(self._reason(content))
        if kind == "failure":
            reason, message = content
            return Failure(self._reason(reason), clean(message))
        raise ValueError(f"an answer of the kind {kind!r}")

    def _reason(self, text: str) -> str:
        reason, colon, rest = clean(text).partition(":")
        return self._name(reason) + colon + rest

    def _name(self, text: str) -> str:
        """The text, or `OTHER` once there are too many different ones."""
        if text in self._known or text in self._new:
            return text
        if len(self._new) == NAMES or not text.strip() or len(text) > NAMES or text != clean(text):
            return OTHER
        self._new.add(text)
        return text


def clean(text: str) -> str:
    """The text without characters that a terminal would interpret, not longer than `SHOWN`."""
    return "".join(one if one.isprintable() else " " for one in text[:SHOWN])
