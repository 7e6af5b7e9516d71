"""What mode=replay prints and writes about a step that was taken with two algorithms."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rft.logger.history import short, write_atomically
from rft.modes.replay.compare import Pair, TokenChange, UpdateComparison
from rft.modes.replay.page import RowIds, Spell, rows_page
from rft.train.folder.resume import Difference, describe_changes

STEP, TOKENS, ROWS = "step.json", "tokens.jsonl", "rows.html"  # in the folder of the comparison
LISTED = 4  # numbers in a message
NOTHING = short(None)
DIGITS = 8  # of them: they may differ by rounding


@dataclass(frozen=True)
class Replayed:
    """A step of a run, taken with the algorithm of the run and with that of the command.

    Attributes:
        step: its number.
        run: the run folder.
        start: the checkpoint that it was taken from; None for the beginning of the run.
        retaken: steps between the checkpoint and the step.
        changes: keys that the command changes.
        unequal: the numbers that the run logged, where the step with its algorithm has others.
        equal: numbers that both have, the unequal ones among them.
        numbers: those of the step that differ between the algorithms.
        updates: of the policy.
        tokens: those whose gradients differ, the largest difference first.
    """

    step: int
    run: Path
    start: Path | None
    retaken: int
    changes: list[Difference]
    unequal: dict[str, Pair]
    equal: int
    numbers: dict[str, Pair]
    updates: list[UpdateComparison]
    tokens: list[TokenChange]


def print_report(found: Replayed, count: int, ids: RowIds, spell: Spell, console: Console) -> None:
    """Prints the comparison.

    Args:
        count: tokens to print.
        ids: token ids of each row.
        spell: the text of token ids.
    """
    for text in (*_head(found), _reproduced(found)):
        console.print(text, soft_wrap=True)
    if found.numbers:
        console.print(_numbers(found.numbers))
    console.print(_updates(found.updates))
    console.print(_counts(found.updates))
    if found.tokens and count:
        console.print(_tokens(found.tokens[:count], len(found.tokens), ids, spell))


def write_report(folder: Path, found: Replayed, ids: RowIds, spell: Spell) -> None:
    """Writes `step.json`, `tokens.jsonl` with every token whose gradient differs, and `rows.html`.

    Arguments as `print_report`.
    """
    facts: dict[str, Any] = asdict(found)
    tokens = facts.pop("tokens")
    facts |= {"run": str(found.run), "start": None if found.start is None else str(found.start)}
    facts["changes"] = {key: [old, new] for key, old, new in found.changes}
    write_atomically(folder / STEP, json.dumps(facts, indent=1, ensure_ascii=False))
    spelled = ({**token, "text": spell([ids[token["row"]][token["position"]]])} for token in tokens)
    write_atomically(folder / TOKENS, "".join(json.dumps(token, ensure_ascii=False) + "\n" for token in spelled))
    title = f"step {found.step} of {found.run}"
    write_atomically(folder / ROWS, rows_page(title, found.tokens, ids, spell))


def _head(found: Replayed) -> list[str]:
    begin = "the beginning of the run" if found.start is None else found.start.name
    between = f", after {found.retaken} steps that were taken again" if found.retaken else ""
    changes = [f"changed: {describe_changes([change])}" for change in found.changes]
    return [
        f"step {found.step} of {found.run}, from {begin}{between}",
        *(changes or ["no key of algorithm differs from the run, so both columns are the same"]),
    ]


def _reproduced(found: Replayed) -> Text:
    if not found.unequal:
        text = f"the algorithm of the run gives all {found.equal} numbers again that the run logged at this step"
        return Text.assemble(("✓ ", "green"), text)
    pairs = [
        f"{name} ({short(old, DIGITS)} there, {short(new, DIGITS)} here)"
        for name, (old, new) in sorted(found.unequal.items(), key=_size)
    ]
    more = f" and {len(pairs) - LISTED} more" if len(pairs) > LISTED else ""
    text = (
        f"with the algorithm of the run {len(pairs)} of {found.equal} numbers differ from those that the run logged: "
        f"{', '.join(pairs[:LISTED])}{more}. The engine, a reward, the device or the ranks do not repeat the step "
        "exactly; below, both algorithms have the same rows and weights"
    )
    return Text.assemble(("✗ ", "yellow"), text)


def _size(item: tuple[str, Pair]) -> float:
    """Sorts numbers by their difference, the largest first."""
    old, new = item[1]
    return -math.inf if old is None or new is None else -abs(old - new)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def _numbers(numbers: dict[str, Pair]) -> Table:
    table = _table("numbers of the step that differ", ["number"], ["run", "command", "difference"])
    for name, (run, command) in numbers.items():
        difference = None if run is None or command is None else command - run
        table.add_row(name, short(run), short(command), short(difference))
    return table


def _updates(updates: Sequence[UpdateComparison]) -> Table:
    title = "updates of the policy, and the cosine between the gradients of its weights"
    table = _table(title, ["update"], ["loss, run", "command", "grad_norm, run", "command", "cosine"])
    for number, update in enumerate(updates, start=1):
        cosine = NOTHING if update.cosine is None else f"{update.cosine:.4f}"
        table.add_row(str(number), *(short(value) for value in (*update.loss, *update.grad_norm)), cosine)
    table.caption = "Both have the same weights until an update differs."
    table.caption_justify = "left"
    return table


def _counts(updates: Sequence[UpdateComparison]) -> Table:
    title = "trained tokens by the gradient of the loss with respect to their log-probability"
    table = _table(title, ["update"], ["tokens", "differ", "zero here", "zero in the run", "opposite sign"])
    for number, update in enumerate(updates, start=1):
        counts = (update.tokens, update.differ, update.lost, update.gained, update.turned)
        table.add_row(str(number), *(f"{count:,}" for count in counts))
    return table


def _tokens(tokens: Sequence[TokenChange], total: int, ids: RowIds, spell: Spell) -> Table:
    title = f"tokens whose gradient differs most: {len(tokens)} of {total:,}"
    names = ["ratio", "run", "command", "difference"]
    table = _table(title, ["update", "row", "position", "token"], names)
    for token in tokens:
        numbers = (token.ratio, token.run, token.command, token.command - token.run)
        text = Text(repr(spell([ids[token.row][token.position]])))
        table.add_row(str(token.update), str(token.row), str(token.position), text, *map(short, numbers))
    return table
