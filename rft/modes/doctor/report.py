"""The report of an examination: the gap of each batch, and the verdict of each check."""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.text import Text
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rft.algorithm.divergence import WORST, k3, log_policy_mismatch
from rft.distributed import World
from rft.logger.console import titled_table, verdict
from rft.metrics import Metrics
from rft.rollout.engine.texts import describe_tokens

EXACT = 1e-6


@dataclass(frozen=True)
class Gap:
    """The difference between trainer and engine on a batch, over all ranks.

    Attributes:
        tokens: number of compared tokens.
        mean, largest: absolute difference of a token's log-probability, in nats.
        kl: estimated KL divergence (k3), in nats per token.
        exact: share of the tokens with a difference of at most `EXACT`.
    """

    tokens: int
    mean: float
    largest: float
    kl: float
    exact: float


class DoctorReport:
    """Collects gaps and verdicts, and prints them.

    Args:
        world: the processes; each holds a part of every batch.
        console: of rank zero.
    """

    def __init__(self, world: World, console: Console) -> None:
        self._world = world
        self._console = console
        self._checks: list[tuple[bool | None, str]] = []
        title, numbers = "log-probabilities: difference between trainer and engine", ("tokens", "mean", "largest", "KL")
        self._gaps = titled_table(title, [""], [*numbers, f"within {EXACT:g}"], pad_edge=False)

    def add_gap(self, name: str, batch: TensorDict, logprobs: Tensor) -> Gap:
        """Adds the gap of a batch to the table. A collective.

        Args:
            name: the title of the line.
            batch: has the engine's log-probabilities.
            logprobs: (B, T) those of the trainer.
        """
        local = (logprobs.double() - batch["rollout_logprobs"])[batch["loss_mask"]]
        differences = torch.cat(self._world.gather(local))
        sizes = differences.abs()
        exact = (sizes <= EXACT).double().mean()
        kl = k3(-differences).mean()
        gap = Gap(len(differences), *(float(number) for number in (sizes.mean(), sizes.max(), kl, exact)))
        numbers = (f"{gap.mean:.2g}", f"{gap.largest:.2g}", f"{gap.kl:.2g}", f"{gap.exact:.0%}")
        self._gaps.add_row(name, f"{gap.tokens:,}", *numbers)
        return gap

    def add_check(self, holds: bool | None, text: str) -> bool:
        """Adds a verdict; returns False if the check failed.

        Args:
            holds: whether the check passed; None for a finding without a verdict.
        """
        self._checks.append((holds, text))
        return holds is not False

    def print(self, batch: TensorDict, logprobs: Tensor, tokenizer: PreTrainedTokenizerBase) -> None:
        """Prints gaps, the worst tokens of a batch, and verdicts. A collective.

        Args:
            batch: has the engine's log-probabilities.
            logprobs: (B, T) those of the trainer.
        """
        worst, metrics = titled_table("the worst tokens", pad_edge=False), Metrics()
        for column in ("group", "position", "before it", "token", "trainer", "engine"):
            worst.add_column(column, justify="left" if column == "token" else "right")
        log_policy_mismatch(metrics, logprobs, batch)
        for token in describe_tokens(metrics.largest_notes(WORST, self._world.gather), tokenizer):
            words = (Text(repr(token["before"])), Text(f"{token['text']!r} ({token['token']})"))
            numbers = (f"{token[name]:.5f}" for name in ("trainer", "engine"))
            worst.add_row(str(token["group"]), str(token["position"]), *words, *numbers)
        self._console.print(self._gaps, worst)
        for holds, text in self._checks:
            self._console.print(verdict(holds, text))
