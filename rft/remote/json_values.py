"""Checks of values in the JSON of a server's answer."""

from collections.abc import Iterable
from typing import Any

IDS = 2**31  # more than any vocabulary has; columns of ids are int32


def are_tokens(values: Iterable[Any]) -> bool:
    """Whether all of them are ids of tokens: whole numbers from 0 on."""
    return all(type(value) is int and 0 <= value < IDS for value in values)


def are_numbers(values: Iterable[Any]) -> bool:
    """Whether all of them are numbers: neither texts nor true, false or null."""
    return all(type(value) is float or type(value) is int for value in values)
