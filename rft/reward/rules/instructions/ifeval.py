"""Does a response follow the verifiable instructions of its row? The rows and rules are those of IFEval."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from rft.errors import prefixed
from rft.registry import Plugin
from rft.reward.rules.instructions.checks import INSTRUCTIONS
from rft.reward.term import REWARDS


@lru_cache(maxsize=4096)
def _build(text: str) -> Plugin:
    return INSTRUCTIONS.build(json.loads(text), "kwargs")


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def instructions_of(row: Mapping[str, Any]) -> list[Plugin]:
    """The instructions of a row.

    Raises:
        ValueError: there are none, the two lists have different lengths, there is no such instruction, or its arguments
            are wrong; names the instruction.
    """
    names, arguments = row["instruction_id_list"], row["kwargs"]
    if not isinstance(names, list) or not isinstance(arguments, list) or not 0 < len(names) == len(arguments):
        raise ValueError(
            "the fields 'instruction_id_list' and 'kwargs' must be lists of one length, with an entry or more; they "
            f"are {names!r:.80} and {arguments!r:.80}"
        )
    instructions = []
    for name, given in zip(names, arguments, strict=True):
        options = {option: _whole(value) for option, value in (given or {}).items() if value is not None}
        with prefixed(f"the instruction {name!r} of the row: "):
            instructions.append(_build(json.dumps({"name": name, **options})))
    return instructions


def variants(response: str) -> list[str]:
    """The texts that loose checks accept: without the first line, the last line, both, and each without asterisks."""
    lines = response.split("\n")
    parts = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [text for part in (response, *parts) for text in (part, part.replace("*", ""))]


@REWARDS.register(
    "ifeval",
    reads=("instruction_id_list", "kwargs"),
    thoughts="skip",
    gold=instructions_of,
)
def ifeval(
    response: str,
    row: Mapping[str, Any],
    *,
    mode: Literal["strict", "loose"],
    score: Literal["all", "share"],
) -> float:
    """1 where the response follows all instructions of its row, else 0; or the share of them that it follows.

    IFEval, arXiv 2311.07911, section 2.2. An empty response follows none.

    Args:
        mode: strict: the response as it is; loose: an instruction is followed if one of `variants` follows it.
        score: all: 1 or 0; share: followed instructions / instructions.
    """
    response = response.lstrip()
    texts = [text for text in (variants(response) if mode == "loose" else [response]) if text.strip()]
    followed = [any(check(text) for text in texts) for check in instructions_of(row)]
    return float(all(followed)) if score == "all" else sum(followed) / len(followed)
