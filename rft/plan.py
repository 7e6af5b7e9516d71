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

from rft.algorithm.roles import ROLES
from rft.provenance import Origin
from rft.rehearsal import Forecast, Rehearsal

TERMS = {
    "weights": "of the policy",
    "gradients": "",
    "optimizer": "its state",
    "ema": "the average of the weights",
    "other models": "beside the policy",
    "engine": "its copy of the weights",
    "gathered": "whole blocks, and what travels",
    "activations": "and everything else",
    "logits": "chunks of them",
    "kv_cache": "",
    "batch": "columns of the rows",
}
MIB, GIB = 2**20, 2**30


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
    job = Rehearsal(config, launched)
    used = {role.key for role in ROLES if role.column in job.method.reads()}
    apart = {"mode", "plan", *(role.key for role in ROLES if role.key not in used)}
    console.print(_values(origin for origin in origins if origin.key.split(".")[0] not in apart))
    forecast = job.forecast()
    console.print(_numbers(job, forecast))
    console.print(_memory(forecast))
    console.print(_verdict(forecast, job.run.plan.memory_gib))
    return forecast.peak()[1] / GIB


def _values(origins: Iterable[Origin]) -> Table:
    table = _table("what is not as in the default run")
    for column in ("key", "value", "default", "from"):
        table.add_column(column, overflow="fold")
    for origin in origins:
        table.add_row(*map(Text, (origin.key, origin.value, origin.default, origin.source)))
    return table


def _numbers(job: Rehearsal, forecast: Forecast) -> Table:
    run, longest = job.run, forecast.prompt_tokens + forecast.answer_tokens
    updates = run.batch.minibatches * run.batch.epochs
    rows = forecast.rows * job.ranks
    table = _table("what is to be done")
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("processes", f"{job.ranks}")
    table.add_row("parameters", f"{forecast.parameters:,}, of which {forecast.trained:,} train")
    table.add_row("rows", f"{rows:,} a step, {forecast.rows:,} of them on each rank")
    table.add_row(
        "tokens",
        f"at most {rows * longest:,} a step: rows of up to {forecast.prompt_tokens:,} + {forecast.answer_tokens:,}",
    )
    table.add_row(
        "forwards",
        f"of up to {forecast.fullest:,} tokens; with rows of full length {forecast.micro_batches:,} for an optimizer "
        "step of a rank",
    )
    trained = run.steps - run.algorithm.critic_warmup
    table.add_row("optimizer steps", f"{updates * trained:,}: {updates} in each of {trained:,} steps")
    if run.warmup is not None:
        table.add_row("", f"and at most {run.warmup.steps:,} in the warm-up before")
    table.add_row("staleness", f"rows train with weights that are 0 to {updates - 1} optimizer steps older or newer")
    return table


def _memory(forecast: Forecast) -> Table:
    most = forecast.peak()[1]
    unit, size = ("GiB", GIB) if most >= GIB else ("MiB", MIB)
    table = _table(f"tensors of each rank in {unit}, at the fullest moment of each stage")
    table.add_column("")
    for stage, terms in forecast.memory.items():
        table.add_column(stage, justify="right", style="bold" if sum(terms.values()) == most else "")
    for term, note in TERMS.items():
        sizes = [terms.get(term, 0) for terms in forecast.memory.values()]
        if any(sizes):
            name = f"{term.replace('_', ' ')}{note and f' ({note})'}"
            table.add_row(name, *(f"{part / size:,.2f}" if part else "" for part in sizes))
    table.add_section()
    table.add_row("together", *(f"{sum(terms.values()) / size:,.2f}" for terms in forecast.memory.values()))
    return table


def _verdict(forecast: Forecast, room: float | None) -> Text:
    stage, size = forecast.peak()
    said = f"The most is {size / GIB:,.2f} GiB, in the stage {stage}."
    if room is None:
        return Text(said)
    left = room - size / GIB
    fits = f"It fits into {room:g} GiB and leaves {left:,.2f}." if left >= 0 else f"That is {-left:,.2f} over {room:g}."
    return Text.assemble(f"{said} ", (fits, "green" if left >= 0 else "bold red"))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE)
