"""Section `staleness`: the final reward of every policy loss if the sampling policy is some updates old.

The policy is a table of logits, so a run of a loss takes a second and its reward is known exactly.
"""

import argparse
import dataclasses
import statistics
from collections import deque
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tensordict import TensorDict
from torch import Tensor

import rft
from bench.options import check_positive
from bench.results import show
from rft.algorithm import LOSSES
from rft.algorithm.algorithm import Algorithm
from rft.algorithm.check import build_algorithm
from rft.algorithm.options import AlgorithmOptions
from rft.metrics import Metrics
from rft.registry import convert

PROMPTS, GROUP, SYMBOLS, LONGEST = 8, 8, 6, 6
LEARNING_RATE = 0.1  # large, so that the policy changes much in 16 updates
CONFIG = Path(rft.__file__).parent / "config"


class Task:
    """Strings to be found: every prompt has one of 3 to 6 symbols, which the seed draws.

    A response ends with the symbol 0. Its reward is the share of the string, that end included, which it has right
    before its first mistake: without the first symbol nothing is earned by the second.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(3, LONGEST, (PROMPTS,), generator=self.generator) + 1  # (P,) with the end
        self.strings = torch.randint(1, SYMBOLS, (PROMPTS, LONGEST), generator=self.generator)  # (P, T)
        self.strings[torch.arange(LONGEST) >= self.lengths[:, None] - 1] = 0
        self.prompts = torch.arange(PROMPTS).repeat_interleave(GROUP)  # (B,)

    def sample(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B, T) of a policy, and a mask of those up to the end."""
        probabilities = table.softmax(-1)
        tokens = torch.zeros(len(self.prompts), LONGEST, dtype=torch.int64)
        before = torch.zeros_like(self.prompts)
        for t in range(LONGEST):
            drawn = torch.multinomial(probabilities[self.prompts, t, before], 1, generator=self.generator)
            tokens[:, t] = before = drawn[:, 0]
        ended = (tokens == 0).cumsum(1) - (tokens == 0).int() > 0
        return tokens, ~ended

    def scores(self, tokens: Tensor) -> Tensor:
        """The reward of every row (B,)."""
        return self._share((tokens == self.strings[self.prompts]).float(), self.prompts)

    def expected(self, table: Tensor) -> float:
        """The mean reward of a policy over its own samples, exactly."""
        right = at(table.softmax(-1), torch.arange(PROMPTS), self.strings).gather(2, self.strings[:, :, None])[:, :, 0]
        return self._share(right, torch.arange(PROMPTS)).mean().item()

    def _share(self, right: Tensor, prompts: Tensor) -> Tensor:
        lengths = self.lengths[prompts, None]
        counted = right.cumprod(1) * (torch.arange(LONGEST) < lengths)  # (B, T)
        return (counted / lengths).sum(1)


def at(table: Tensor, prompts: Tensor, tokens: Tensor) -> Tensor:
    """The entries of a table (P, T, V, V) at the prefixes of some tokens (B, T): (B, T, V)."""
    before = torch.nn.functional.pad(tokens[:, :-1], (1, 0))
    return table[prompts[:, None], torch.arange(LONGEST), before]


def outputs(table: Tensor, prompts: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """The columns that an actor's forward computes, (B, T) each."""
    logprobs = at(table, prompts, tokens).log_softmax(-1)  # (B, T, V)
    probabilities = logprobs.exp()
    return {
        "logprobs": logprobs.gather(2, tokens[:, :, None])[:, :, 0],
        "entropy": -(probabilities * logprobs).sum(-1),
        "sum_p_squared": probabilities.square().sum(-1),
    }


def train(algorithm: Algorithm, staleness: int, seed: int, updates: int) -> float:
    """Expected reward after some updates with samples of the policy that was `staleness` updates old (at most)."""
    task = Task(seed)
    table = torch.zeros(PROMPTS, LONGEST, SYMBOLS, SYMBOLS, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=LEARNING_RATE)
    past = deque([table.detach().clone()], maxlen=staleness + 1)
    reference, metrics = table.detach().clone(), Metrics()
    for update in range(updates):
        tokens, keep = task.sample(past[0])
        sampled = outputs(past[0], task.prompts, tokens)
        columns = {
            "loss_mask": keep,
            "group": task.prompts,
            "unit": torch.arange(len(tokens)),
            "scores": task.scores(tokens),
            "old_logprobs": sampled["logprobs"],
            "rollout_logprobs": sampled["logprobs"],
            "sum_p_squared": sampled["sum_p_squared"],
            "ref_logprobs": outputs(reference, task.prompts, tokens)["logprobs"],
        }
        batch = TensorDict(columns, batch_size=[len(tokens)])
        if algorithm.policy.terms[0].plugin.facts.unit == "group":
            batch["unit"] = batch["group"]
        current = outputs(table, task.prompts, tokens)
        algorithm.estimate_advantages(batch, alone, metrics)
        algorithm.prepare({name: column.detach() for name, column in current.items()}, batch, alone, update, metrics)
        loss, _, _ = algorithm.policy(current, batch, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        past.append(table.detach().clone())
    return task.expected(table.detach())


def alone(tensor: Tensor) -> Tensor:
    """The sum over the ranks, of which there is one."""
    return tensor


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `staleness`."""
    parser.add_argument("--losses", nargs="+", metavar="name", help="option files of algorithm/loss (default: all)")
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 2, 8, 16], help="updates (default: 0 2 8 16)")
    parser.add_argument("--updates", type=int, default=200, help="optimizer steps of a run (default: 200)")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each (default: 4)")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/staleness.json"), help="for the numbers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Trains, prints a table, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
    """
    check_positive(arguments, "updates", "seeds")
    if min(arguments.staleness) < 0:
        raise ValueError(f"--staleness {min(arguments.staleness)}: give 0 or more")
    torch.set_num_threads(1)  # the tensors are too small for more
    console = Console()
    algorithms = {name: method_of(name) for name in arguments.losses or policy_losses()}
    work = [(name, age, seed) for name in algorithms for age in arguments.staleness for seed in range(arguments.seeds)]
    found: dict[str, dict[str, list[float]]] = {
        name: {str(age): [] for age in arguments.staleness} for name in algorithms
    }
    for name, age, seed in track(work, "runs", console=console, transient=True):
        found[name][str(age)].append(train(algorithms[name], age, seed, arguments.updates))
    numbers = {
        "updates": arguments.updates,
        "seeds": arguments.seeds,
        "learning_rate": LEARNING_RATE,
        "rewards": found,
        "methods": {name: described(algorithm) for name, algorithm in algorithms.items()},
    }
    show(console, arguments.out, numbers, table(numbers))


def policy_losses() -> list[str]:
    """The option files of algorithm/loss whose loss learns from a reward."""
    names = sorted(path.stem for path in (CONFIG / "algorithm" / "loss").glob("*.yaml"))
    return [name for name in names if {"advantages", "scores"} & {*LOSSES.build(node_of(name), "loss").facts.reads}]


def node_of(loss: str) -> dict[str, Any]:
    """The content of an option file of algorithm/loss.

    Raises:
        ValueError: there is no such file.
    """
    path = CONFIG / "algorithm" / "loss" / f"{loss}.yaml"
    if not path.exists():
        raise ValueError(f"--losses {loss}: there is no {path.name} in algorithm/loss")
    node: Any = OmegaConf.to_container(OmegaConf.load(path))
    return node


def method_of(loss: str) -> Algorithm:
    """A loss in the algorithm that is named after it, or that names it, or the default one: with its advantage, terms
    and aggregation, without what changes rewards, corrects or masks.
    """
    algorithms = {
        path.stem: OmegaConf.load(path).defaults for path in sorted((CONFIG / "algorithm").glob("[!_]*.yaml"))
    }
    naming = [name for name, defaults in algorithms.items() if {"override loss": loss} in defaults]
    named = [name for name in (loss, node_of(loss)["name"]) if name in algorithms]
    algorithm = [f"algorithm={name}" for name in (*named, *naming)[:1]]
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        config = compose("main", [*algorithm, f"algorithm/loss={loss}"])
    whole: Any = OmegaConf.to_container(config, resolve=True)
    options = convert(whole["algorithm"], AlgorithmOptions, "algorithm")
    off: dict[str, Any] = {"shaping": {}, "reward_kl": None, "critic_loss": None, "prm_loss": None, "critic_warmup": 0}
    off |= {"correction": None, "gradient_mask": None, "old_logprobs": "rollout"}
    return build_algorithm(dataclasses.replace(options, **off), "algorithm")


def described(algorithm: Algorithm) -> dict[str, Any]:
    """The parts of a method by name."""
    aggregation = algorithm.aggregation.name if algorithm.aggregation else algorithm.policy.terms[0].plugin.facts.unit
    terms = [term.plugin.name for term in algorithm.policy.terms[1:]]
    return {"advantage": algorithm.advantage and algorithm.advantage.name, "terms": terms, "aggregation": aggregation}


def table(numbers: dict[str, Any]) -> Table:
    """Mean and standard error over the seeds."""
    shown = Table(title="final reward (at most 1) by the age of the policy that sampled, in updates")
    shown.add_column("loss")
    ages = next(iter(numbers["rewards"].values()))
    for age in ages:
        shown.add_column(age, justify="right")
    for name, rewards in numbers["rewards"].items():
        shown.add_row(name, *[cell(rewards[age]) for age in ages])
    shown.caption = (
        f"{numbers['updates']} updates of Adam with learning rate {numbers['learning_rate']}, one for each batch of "
        f"{PROMPTS} prompts x {GROUP} samples; mean and standard error of {numbers['seeds']} seeds; every loss has "
        "the advantage, the terms and the aggregation of its algorithm"
    )
    return shown


def cell(rewards: list[float]) -> str:
    """`mean ± standard error`, or the number if there is only one seed."""
    mean = f"{statistics.mean(rewards):.2f}"
    return mean if len(rewards) == 1 else f"{mean} ± {statistics.stdev(rewards) / len(rewards) ** 0.5:.2f}"
