"""What is written down during an examination: gaps of one batch after another, and a verdict on each check."""

from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rft.algorithm.kl import k3
from rft.algorithm.mismatch import WORST, log_policy_mismatch
from rft.distributed import World
from rft.metrics import Metrics
from rft.rollout.engine.texts import describe_tokens

EXACT = 1e-6
MARKS = {True: ("✓ ", "green"), False: ("✗ ", "bold red"), None: ("• ", "dim")}


@dataclass(frozen=True)
class Gap:
    """How far trainer and engine are apart on a batch, over all ranks: |difference| of a token's log-probability."""

    tokens: int
    mean: float
    largest: float
    kl: float
    exact: float


class DoctorReport:
    """Collects tables and verdicts.

    Args:
        world: whose ranks hold a part of each batch.
        console: of rank zero.
    """

    def __init__(self, world: World, console: Console) -> None:
        self._world = world
        self._console = console
        self._checks: list[tuple[bool | None, str]] = []
        self._gaps = _table("log-probabilities: how far the trainer is from the engine")
        self._gaps.add_column("", overflow="fold")
        for column in ("tokens", "mean", "largest", "KL", f"within {EXACT:g}"):
            self._gaps.add_column(column, justify="right", no_wrap=True)

    def note(self, what: str, batch: TensorDict, logprobs: Tensor) -> Gap:
        """The gap of a batch that the trainer has scored, as a line of the table.

        Args:
            logprobs: of the trainer, (B, T).
        """
        mine = (logprobs.double() - batch["rollout_logprobs"])[batch["keep"]]
        apart = torch.cat(self._world.gather(mine))
        sizes = apart.abs()
        exact = (sizes <= EXACT).double().mean()
        gap = Gap(len(apart), *(float(number) for number in (sizes.mean(), sizes.max(), k3(-apart).mean(), exact)))
        numbers = (f"{gap.mean:.2g}", f"{gap.largest:.2g}", f"{gap.kl:.2g}", f"{gap.exact:.0%}")
        self._gaps.add_row(what, f"{gap.tokens:,}", *numbers)
        return gap

    def say(self, holds: bool | None, text: str) -> bool:
        """A line of the verdict, None for what is told and not judged; False where the check failed."""
        self._checks.append((holds, text))
        return holds is not False

    def show(self, batch: TensorDict, logprobs: Tensor, tokenizer: PreTrainedTokenizerBase) -> None:
        """Prints everything, with the worst tokens of a batch that the trainer has scored."""
        worst, metrics = _table("the worst tokens"), Metrics()
        for column in ("group", "position", "before it", "token", "trainer", "engine"):
            worst.add_column(column, justify="left" if column == "token" else "right")
        log_policy_mismatch(metrics, logprobs, batch)
        for token in describe_tokens(metrics.largest_notes(WORST, self._world.gather), tokenizer):
            words = (Text(repr(token["before"])), Text(f"{token['text']!r} ({token['token']})"))
            numbers = (f"{token[name]:.5f}" for name in ("trainer", "engine"))
            worst.add_row(str(token["group"]), str(token["position"]), *words, *numbers)
        self._console.print(self._gaps, worst)
        for holds, text in self._checks:
            self._console.print(Text.assemble(MARKS[holds], text))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False)
