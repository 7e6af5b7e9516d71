"""Random responses to rows with random answers.

A row that no response can match is refused in one line. For any other, each rule returns a score from -1 to 1 or says
that it has none, the same one each time, and the responses that it calls right have the score 1.
"""

import math
import re
from functools import cache
from random import Random
from typing import Any

from bench.reward_yaml import build_reward, options

from fuzzing.pieces import changed, text, value
from rft.errors import FunctionError
from rft.reward.compose import WeightedSum

CALL = {"name": "add", "arguments": {"a": 1, "b": "two", "c": [True, None]}}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "array"}},
    "required": ["a"],
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}]
FORMATS = (
    "hermes",
    "qwen_xml",
    "glm",
    "llama_json",
    "llama_python",
    "mistral",
    "deepseek",
    "kimi_k2",
    "harmony",
    "list",
)
FORMULAS = (
    "\\frac{1}{2}",
    "x^2+3x-1",
    "(1, 2)",
    "\\{1,2,3\\}",
    "12{,}345",
    "5\\%",
    "3:4",
    "[0,\\infty)",
    "x=3",
    "2^{\\sqrt 3}",
)
ANSWERS = {
    "choice": ("A", "b", "(C)", "D."),
    "exact_match": ("7", "é"),
    "gsm8k": ("#### 72", "1,000", "-3.5", "$20"),
    "json": ('{"a": [1, 2.50, null]}', "[1]"),
    "math": (*FORMULAS, *(f"\\boxed{{{formula}}}" for formula in FORMULAS), "#### 12"),
    "overlap": ("the cat sat", "中 文", "a"),
    "verdict": ("yes", "No"),
}
READ = re.compile(r"(?i)think>|tool_call>|answer|[$`*!\x00-\x1f]|\\[a-z]*$")
OTHER = ("format", "repetition", "script", "tag_count", "tags")  # these read no answer
NAMES = (*ANSWERS, *OTHER, *(f"tool_call/{name}" for name in FORMATS))


@cache
def reward(name: str) -> WeightedSum:
    """The reward of one rule, in this process."""
    term, _, format = name.partition("/")
    node = options(f"terms/{term}.yaml")[term] | {"call": {"workers": "inline", "failed": "stop"}}
    return build_reward({term: node | ({"format": format} if format else {})}, term)


def make(random: Random) -> dict[str, Any]:
    """A rule, a response and a row."""
    name = random.choice(NAMES)
    if name in ANSWERS:
        answer = random.choice(ANSWERS[name])
        answer = text(random, ANSWERS[name], 4) if random.random() < 0.3 else answer + text(random, longest=1)
    else:
        answer = changed(random, [CALL] * random.randrange(1, 3))
    opens = random.choice(({}, {}, {"prompt_opens": "<think>"}))
    row = {"prompt": text(random, longest=3), "answer": answer, "tools": TOOLS, **opens}
    marks = [answer, *map(str, ANSWERS.get(name, ()))] if isinstance(answer, str) else []
    response: Any = text(random, marks) if random.random() < 0.95 else str(value(random))
    return {"rule": name, "response": response, "row": row}


def title(made: dict[str, Any]) -> str:
    """What inputs have in common whose faults are probably one."""
    return str(made["rule"])


def check(made: dict[str, Any]) -> None:
    """Raises an AssertionError, or whatever the rule raises, where it does not do what the module says."""
    found, response, row = reward(made["rule"]), made["response"], made["row"]
    try:
        found.check_row(row)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000, f"a message of several lines: {error}"
        return
    [name] = found.names
    score = _score(found, name, response, row)
    assert math.isnan(score) or -1 <= score <= 1, f"the score {score}"
    again = _score(found, name, response, row)
    assert score == again or (math.isnan(score) and math.isnan(again)), f"the scores {score} and {again}"
    found.extract([response], [row])
    if not plain_answer(row["answer"]):
        return
    plain = {field: entry for field, entry in row.items() if field != "prompt_opens"}
    for written in found.terms[name].gold_responses(plain):
        score = _score(found, name, written, plain)
        assert score == 1, f"{written!r} is right by the rule and has the score {score}"


def plain_answer(answer: Any) -> bool:
    """Whether an answer holds no mark by which responses are read, so that a response can repeat it."""
    return not READ.search(str(answer)) and str(answer).count("{") == str(answer).count("}")


def _score(found: WeightedSum, name: str, response: str, row: dict[str, Any]) -> float:
    try:
        return float(found.score([response], [row]).terms[name][0])
    except FunctionError as error:
        if "no score (" not in str(error):  # the rule has raised something
            raise
        return math.nan
