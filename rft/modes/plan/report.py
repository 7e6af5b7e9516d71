"""Prints what a run will take, before anything is paid for: memory by stage and term, steps, and what is not default.

The memory is that of tensors on the device. Left out is what cannot be counted there: the process and the context of a
GPU, what an allocator keeps without need, workspaces inside single operations; and checkpoints, which the host gathers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rft.algorithm.roles import ROLES
from rft.modes.plan.config_origin import Origin
from rft.modes.plan.job import Forecast, PlanJob

TERMS = (
    "weights",
    "gradients",
    "optimizer",
    "ema",
    "other models",
    "engine",
    "gathered",
    "activations",
    "logits",
    "kv cache",
    "batch",
)
GIB = 2**30
LONGEST = 60  # characters of a default that are shown


def plan(config: dict[str, Any], launched: int, origins: Sequence[Origin], console: Console) -> float:
    """Checks everything, goes through the run without weights, and prints what it takes.

    Args:
        config: the resolved config as plain containers.
        launched: processes of this launch.
        origins: the values that are not default.

    Returns:
        The most memory that a rank takes, in GiB.

    Raises:
        ValueError: everything that is wrong with the config.
    """
    job = PlanJob(config, launched)
    forecast = job.forecast()
    used = {role.key for role in ROLES if role.writes(job.algorithm.reads())}
    apart = {"mode", "plan", *(role.key for role in ROLES if role.key not in used)}
    console.print(_values(origin for origin in origins if origin.key.split(".")[0] not in apart))
    console.print(_numbers(job, forecast))
    console.print(_memory(forecast))
    console.print(_verdict(forecast, job.run.plan.memory_gib))
    return forecast.peak()[1] / GIB


def _values(origins: Iterable[Origin]) -> Tree:
    """The values by where they come from, each with its default."""
    tree, branches = Tree(Text("what is not as in the default run", style="bold")), dict[str, Tree]()
    for origin in origins:
        follows = "${" in origin.source
        source = "other values" if follows else origin.source
        if source not in branches:
            branches[source] = tree.add(Text(source, style="cyan"))
        before = origin.default if len(origin.default) <= LONGEST else f"{origin.default[: LONGEST - 3]}..."
        note = f" = {origin.source}" if follows else f" (not {before})" if before else ""
        branches[source].add(Text.assemble(f"{origin.key}: {origin.value}", (note, "dim")))
    return tree


def _numbers(job: PlanJob, forecast: Forecast) -> Table:
    run, longest = job.run, forecast.prompt_tokens + forecast.answer_tokens
    rows, updates = forecast.rows * job.ranks, run.batch.minibatches * run.batch.epochs
    steps = run.steps - run.algorithm.critic_warmup
    before = "" if run.warmup is None else f", after at most {run.warmup.steps:,} of the warm-up"
    facts = {
        "processes": f"{job.ranks}",
        "parameters": f"{forecast.parameters:,}, of which {forecast.trained:,} train",
        "rows": f"{rows:,} a step, {forecast.rows:,} of them on each rank",
        "tokens": f"at most {rows * longest:,} a step, {forecast.prompt_tokens:,} + {forecast.answer_tokens:,} a row",
        "forwards": f"of at most {forecast.fullest:,} tokens; {forecast.micro_batches:,} of them in an optimizer step "
        "of a rank, where all rows are that long",
        "optimizer steps": f"{updates * steps:,}: {updates:,} in each of {steps:,} steps{before}",
    }
    if job.facts.sampled != "never":
        if run.algorithm.sampler == "reference":
            updates *= run.algorithm.iteration or run.steps
        after = f"rows train up to {updates - 1:,} optimizer steps after they were sampled"
        facts["staleness"] = "none: rows train the weights that sampled them" if updates == 1 else after
    if not job.engine.factory.facts.plain_torch:
        facts["engine"] = "its own memory is not counted here; rollout.engine_args says what it takes"
    table = _table("what is to be done")
    table.show_header = False
    for fact, said in facts.items():
        table.add_row(fact, said)
    return table


def _memory(forecast: Forecast) -> Table:
    most = forecast.peak()[1]
    unit, size = _unit(most)
    table = _table(f"tensors of each rank in {unit}, at the fullest moment of each stage")
    table.add_column("", no_wrap=True)
    for stage, terms in forecast.memory.items():
        table.add_column(stage, justify="right", no_wrap=True, style="bold" if sum(terms.values()) == most else "")
    for term in TERMS:
        sizes = [terms.get(term, 0) for terms in forecast.memory.values()]
        if any(sizes):
            table.add_row(term, *(f"{part / size:,.2f}" if part else "" for part in sizes))
    table.add_section()
    table.add_row("together", *(f"{sum(terms.values()) / size:,.2f}" for terms in forecast.memory.values()))
    return table


def _verdict(forecast: Forecast, room: float | None) -> Text:
    stage, most = forecast.peak()
    unit, size = _unit(most)
    said = f"The most is {most / size:,.2f} {unit}, in the stage {stage}."
    if room is None:
        return Text(said)
    left = room - most / GIB
    fits = (
        f"It fits into {room:g} GiB and leaves {left:,.2f}." if left >= 0 else f"It is {-left:,.2f} over {room:g} GiB."
    )
    return Text.assemble(f"{said} ", (fits, "green" if left >= 0 else "bold red"))


def _unit(most: int) -> tuple[str, int]:
    return ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False
    )
