"""Rewards that are functions of one response and its row. Importing this package registers them."""

from rft.reward.rules import (
    choice,
    gsm8k,
    instructions,
    json_schema,
    math,
    overlap,
    repetition,
    script,
    tags,
    text,
    tool_calls,
)

__all__ = [
    "choice",
    "gsm8k",
    "instructions",
    "json_schema",
    "math",
    "overlap",
    "repetition",
    "script",
    "tags",
    "text",
    "tool_calls",
]
