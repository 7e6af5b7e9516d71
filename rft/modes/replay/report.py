"""What mode=replay prints and writes about a step that was taken with two algorithms."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file

from rft.errors import listed
from rft.logger.console import titled_table, verdict
from rft.logger.history import short, write_atomically
from rft.modes.replay.compare import Comparison, Pair, TokenChange, UpdateComparison
from rft.modes.replay.page import RowTexts, rows_page
from rft.modes.replay.recorder import StepRecord
from rft.train.checkpoint.names import step_of
from rft.train.folder.resume import Difference, describe_changes

STEP, TOKENS, ROWS = "step.json", "tokens.jsonl", "rows.html"  # in the folder of the comparison
ALL_TOKENS = "tokens.safetensors"
LISTED = 4  # numbers in a message
NOTHING = short(None)
DIGITS = 8  # of them: they may differ by rounding


@dataclass(frozen=True)
class Origin:
    """What was taken again, and what differs in the command.

    Attributes:
        step: the number of the step.
        run: the run folder.
        start: the checkpoint that the step was taken from; None for the beginning of the run.
        changes: keys that the command changes.
    """

    step: int
    run: Path
    start: Path | None
    changes: list[Difference]

    @property
    def retaken(self) -> int:
        """Steps between the checkpoint and the step."""
        return self.step - 1 - step_of(self.start)


def print_report(origin: Origin, comparison: Comparison, count: int, texts: RowTexts, console: Console) -> None:
    """Prints the comparison.

    Args:
        count: tokens to print.
        texts: of the rows.
    """
    for text in (*_head(origin), _reproduced(comparison)):
        console.print(text, soft_wrap=True)
    if comparison.numbers:
        console.print(_numbers(comparison.numbers))
    if not comparison.updates:
        console.print("the policy does not train in this step")
        return
    console.print(_updates(comparison.updates))
    console.print(_counts(comparison.updates))
    if comparison.tokens and count:
        total = sum(update.differ for update in comparison.updates)
        console.print(_tokens(comparison.tokens[:count], total, texts))


def write_tokens(folder: Path, texts: RowTexts, run: StepRecord, command: StepRecord) -> None:
    """Writes `tokens.safetensors`: `input_ids` (R, T), and for each update, (U, R, T), the tokens that are `trained`
    with one of the algorithms, their `ratio`, and their gradient with the algorithm of the `run` and of the `command`.
    """
    ids = torch.zeros(run.shape, dtype=torch.int64)
    for row, tokens in texts.ids.items():
        ids[row, : len(tokens)] = torch.tensor(tokens)
    pairs = list(zip(run.updates, command.updates, strict=True))
    columns = {
        "trained": [one.trained | other.trained for one, other in pairs],
        "ratio": [one.ratio.float() for one, _ in pairs],
        "run": [one.gradient.float() for one, _ in pairs],
        "command": [other.gradient.float() for _, other in pairs],
    }
    # none if the policy does not train
    stacked = {name: torch.stack(parts) for name, parts in columns.items() if parts}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"input_ids": ids, **stacked}, folder / ALL_TOKENS)


def write_report(folder: Path, origin: Origin, comparison: Comparison, texts: RowTexts) -> None:
    """Writes `step.json`, `tokens.jsonl` with the tokens whose gradient differs most, and `rows.html`."""
    facts = {
        "step": origin.step,
        "run": str(origin.run),
        "start": None if origin.start is None else str(origin.start),
        "retaken": origin.retaken,
        "changes": {key: [old, new] for key, old, new in origin.changes},
        "compared": comparison.compared,
        "unequal": comparison.unequal,
        "numbers": comparison.numbers,
        "updates": [asdict(update) for update in comparison.updates],
    }
    tokens = ({**asdict(token), "text": texts.token(token.row, token.position)} for token in comparison.tokens)
    write_atomically(folder / STEP, json.dumps(facts, indent=1, ensure_ascii=False))
    write_atomically(folder / TOKENS, "".join(json.dumps(token, ensure_ascii=False) + "\n" for token in tokens))
    write_atomically(folder / ROWS, rows_page(f"step {origin.step} of {origin.run}", comparison.tokens, texts))


def _head(origin: Origin) -> list[str]:
    begin = "the beginning of the run" if origin.start is None else origin.start.name
    between = f" (steps before it that are taken again: {origin.retaken})" if origin.retaken else ""
    changes = [f"changed: {describe_changes([change])}" for change in origin.changes]
    return [
        f"step {origin.step} of {origin.run}, from {begin}{between}",
        *(changes or ["no key of algorithm differs from the run, so both columns are the same"]),
    ]


def _reproduced(comparison: Comparison) -> Text:
    if not comparison.unequal:
        numbers = f"all {comparison.compared} numbers again that the run logged at this step"
        return verdict(True, f"the algorithm of the run gives {numbers}")
    pairs = [
        f"{name} ({short(old, DIGITS)} there, {short(new, DIGITS)} here)"
        for name, (old, new) in sorted(comparison.unequal.items(), key=_size)
    ]
    text = (
        f"with the algorithm of the run {len(pairs)} of {comparison.compared} numbers differ from those that it "
        f"logged: {listed(pairs, LISTED)}. The engine, a reward, the device or the ranks do not repeat the step "
        "exactly; below, both algorithms have the same rows and weights"
    )
    return Text.assemble(("✗ ", "yellow"), text)


def _size(item: tuple[str, Pair]) -> float:
    """Sorts numbers by their difference, the largest first."""
    old, new = item[1]
    return -math.inf if old is None or new is None else -abs(old - new)


def _numbers(numbers: dict[str, Pair]) -> Table:
    table = titled_table("numbers of the step that differ", ["number"], ["run", "command", "difference"])
    for name, (run, command) in numbers.items():
        difference = None if run is None or command is None else command - run
        table.add_row(name, short(run), short(command), short(difference))
    return table


def _updates(updates: Sequence[UpdateComparison]) -> Table:
    title = "updates of the policy, and the cosine between the gradients of its weights"
    table = titled_table(title, ["update"], ["loss, run", "command", "grad_norm, run", "command", "cosine"])
    for number, update in enumerate(updates, start=1):
        cosine = NOTHING if update.cosine is None else f"{update.cosine:.4f}"
        table.add_row(str(number), *(short(value) for value in (*update.loss, *update.grad_norm)), cosine)
    table.caption = "Both have the same weights until an update differs."
    table.caption_justify = "left"
    return table


def _counts(updates: Sequence[UpdateComparison]) -> Table:
    title = "trained tokens by the gradient of the loss with respect to their log-probability"
    table = titled_table(title, ["update"], ["tokens", "differ", "zero here", "zero in the run", "opposite sign"])
    for number, update in enumerate(updates, start=1):
        counts = (update.tokens, update.differ, update.lost, update.gained, update.turned)
        table.add_row(str(number), *(f"{count:,}" for count in counts))
    return table


def _tokens(tokens: Sequence[TokenChange], total: int, texts: RowTexts) -> Table:
    title = f"tokens whose gradient differs most: {len(tokens)} of {total:,}"
    names = ["ratio", "run", "command", "difference"]
    table = titled_table(title, ["update", "row", "position", "token"], names)
    for token in tokens:
        numbers = (token.ratio, token.run, token.command, token.command - token.run)
        text = Text(repr(texts.token(token.row, token.position)))
        table.add_row(str(token.update), str(token.row), str(token.position), text, *map(short, numbers))
    return table
