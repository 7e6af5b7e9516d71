"""Pieces of which random input is made: texts, JSON values, and values that are changed in one place."""

import copy
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

MARKS = (
    *("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|im_end|>"),
    *("<|im_start|>assistant\n", "\\boxed{", "}", "{", "\\frac", "\\frac{1}{", "\\sqrt[", "$", "\\(", "####", "```"),
    *("```json\n", "```python\n", "answer is", "Answer:", "(A)", "B.", '{"name": "f", "arguments": ', "[[", "]]", '"'),
    *("\\left(", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "verdict: ", "**", "^{", "_", "!", "%", "\\%", ","),
)
LETTERS = (
    *("0", "7", "12,345", "-3.5", "1e999", "1e-999", "0/0", "9" * 400, "a", "é", "中", "\u0627\u0644", "\U0001f600"),
    *(
        " ",
        "\n",
        "\t",
        "\r\n",
        "\0",
        "\x1b[31m",
        "[/b]",
        "[red]",
        "\u2028",
        "\u202e",
        "\u200b",
        "\ufeff",
        "\xa0",
        "e\u0301",
    ),
    *(
        "..",
        "/",
        "\\",
        "'",
        "`",
        "<",
        ">",
        "&amp;",
        "{prompt}",
        "{{ x }}",
        "{% if %}",
        "%s",
        "${x}",
        "NaN",
        "None",
        "true",
    ),
)
SCALARS = (None, True, False, 0, -1, 7, 2**31, 2**63, 10**300, 0.5, -0.0, 1e308, 1e-320, "", " ", "7", "true", "null")


def text(random: Random, marks: Sequence[str] = (), longest: int = 12) -> str:
    """A text of up to `longest` pieces; one in fifty repeats a piece two thousand times."""
    pieces = (*MARKS, *LETTERS, *marks, *marks)
    if random.random() < 0.02:
        return random.choice(pieces) * 2000
    return "".join(random.choice(pieces) for _ in range(random.randrange(longest + 1)))


def value(random: Random, depth: int = 3) -> Any:
    """A JSON value of up to `depth` levels."""
    kind = random.randrange(6 if depth else 4)
    if kind < 2:
        return random.choice(SCALARS)
    if kind < 4:
        return text(random, longest=4)
    if kind == 4:
        return [value(random, depth - 1) for _ in range(random.randrange(4))]
    return {text(random, longest=2): value(random, depth - 1) for _ in range(random.randrange(4))}


def places(whole: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside of a JSON value."""
    steps: list[Any] = (
        list(whole) if isinstance(whole, dict) else list(range(len(whole))) if isinstance(whole, list) else []
    )
    return [(*path, step) for step in steps] + [
        deeper for step in steps for deeper in places(whole[step], (*path, step))
    ]


def changed(random: Random, whole: Any, most: int = 2) -> Any:
    """The value with up to `most` of the values inside of it replaced, removed, doubled or renamed."""
    found = copy.deepcopy(whole)
    for _ in range(random.randrange(most + 1)):
        if not (paths := places(found)):
            return value(random)
        *above, last = random.choice(paths)
        holder = found
        for step in above:
            holder = holder[step]
        random.choice(CHANGES)(random, holder, last)
    return found


def _replace(random: Random, holder: Any, place: Any) -> None:
    holder[place] = value(random)


def _remove(random: Random, holder: Any, place: Any) -> None:
    del holder[place]


def _double(random: Random, holder: Any, place: Any) -> None:
    if isinstance(holder, list):
        holder.insert(place, copy.deepcopy(holder[place]))
    else:
        holder[text(random, longest=2)] = copy.deepcopy(holder[place])


def _into_text(random: Random, holder: Any, place: Any) -> None:
    holder[place] = str(holder[place])


def _into_list(random: Random, holder: Any, place: Any) -> None:
    holder[place] = [holder[place]]


CHANGES: tuple[Callable[[Random, Any, Any], None], ...] = (_replace, _replace, _remove, _double, _into_text, _into_list)
