"""Prints the cost of a run before it starts: memory by stage and term, steps, and the values that are not defaults.

The memory is that of tensors on the device. It does not include the process and the context of a GPU, the cache of the
allocator, and workspaces inside single operations.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rft.algorithm.roles import ROLES
from rft.logger.console import titled_table
from rft.modes.plan.config_origin import Origin, origins
from rft.modes.plan.job import Forecast, PlanJob
from rft.modes.plan.memory_tracker import device_bytes, host_bytes
from rft.setup.typed import typed_overrides
from rft.strategy.base import HOST

TERMS = (
    "weights",
    "gradients",
    "optimizer",
    "ema",
    "other models",
    "reward models",
    "engine",
    "loading",
    "gathered",
    "activations",
    "logits",
    "kv cache",
    "batch",
    "export",
    "checkpoint",
    "file",
)
SELDOM = ("load", "begin", "reference", "export", "save")  # stages beside those of a step
GIB = 2**30
SHOWN = 0.005  # of the unit; less is an empty cell
LONGEST = 60  # characters that are printed of a default


class Saving(NamedTuple):
    """What an offload option that is not set would change.

    Attributes:
        override: that sets it.
        peak: bytes of the device at the peak of the run with it.
        stage: in which it saves most.
        saved: bytes of the device that it saves in this stage.
        host: bytes of host memory that it adds to the most of any stage.
    """

    override: str
    peak: int
    stage: str
    saved: int
    host: int


def plan_run(config: dict[str, Any], console: Console) -> float:
    """`mode=plan`: the plan of a command line, with the values that its overrides and its recipe change.

    Args:
        config: the resolved config as plain containers.
        console: of rank zero.

    Returns:
        The peak memory of a rank, in GiB.

    Raises:
        ValueError: lists all mistakes of the config.
    """
    loader, name = GlobalHydra.instance().config_loader(), str(HydraConfig.get().job.config_name)
    changed = origins(loader, name, typed_overrides())
    return plan(config, int(os.environ.get("WORLD_SIZE", "1")), changed, console)


def plan(config: dict[str, Any], launched: int, changed: Sequence[Origin], console: Console) -> float:
    """Checks the config, takes the steps of the run on placeholders, and prints the cost.

    Args:
        config: the resolved config as plain containers.
        launched: number of processes of this launch.
        changed: the values that are not defaults.
        console: the output.

    Returns:
        The peak memory of a rank, in GiB.

    Raises:
        ValueError: lists all mistakes of the config.
    """
    job = PlanJob(config, launched)
    forecast = job.forecast()
    hidden = {"mode", "plan", *(role.key for role in ROLES if not role.writes(job.algorithm.reads()))}
    console.print(_values(origin for origin in changed if origin.key.split(".")[0] not in hidden))
    console.print(_numbers(job, forecast))
    for title, seldom in (("in a step", False), ("to load and save", True)):
        stages = [stage for stage in forecast.memory if (stage in SELDOM) == seldom]
        console.print(_memory(forecast, title, stages))
    console.print(_peak(forecast, job.run.plan.memory_gib))
    if job.run.plan.offload:
        console.print(_offload(savings(job, config, launched, forecast), forecast))
    return forecast.peak()[1] / GIB


def _values(origins: Iterable[Origin]) -> Tree:
    """The values grouped by their source, each with its default."""
    tree, branches = Tree(Text("values that differ from the default run", style="bold")), dict[str, Tree]()
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
    steps = run.step_count() - run.algorithm.critic_warmup
    before = "" if run.warmup is None else f", after at most {run.warmup.steps:,} of the warm-up"
    facts = {
        "processes": f"{job.ranks}",
        "parameters": f"{forecast.parameters:,}, of which {forecast.trained:,} train",
        "rows": f"{rows:,} a step, {forecast.rows:,} of them on each rank",
        "tokens": f"at most {rows * longest:,} a step, {forecast.prompt_tokens:,} + {forecast.answer_tokens:,} a row",
        "forwards": f"at most {forecast.fullest:,} tokens each; {forecast.micro_batches:,} in an optimizer step, "
        "per rank, if all rows have that length",
        "optimizer steps": f"{updates * steps:,}: {updates:,} in each of {steps:,} steps{before}",
    }
    if job.facts.sampled != "never":
        if run.algorithm.sampler == "reference":
            updates *= run.algorithm.iteration or run.step_count()
        updates *= run.rollout.staleness + 1
        stale = f"rows train up to {updates - 1:,} optimizer steps after they were sampled"
        facts["staleness"] = "none: rows train the weights that sampled them" if updates == 1 else stale
    if not job.engine.factory.facts.plain_torch:
        facts["engine"] = "its memory is not counted here; rollout.engine_args sets it"
    if job.reward.has_models and not job.reward.shard:
        there = "that of all in every stage" if job.reward.offload is None else "that of the largest while they score"
        facts["reward models"] = f"their memory is not counted here: {there} (reward.offload)"
    table = _table("work")
    table.show_header = False
    for name, text in facts.items():
        table.add_row(name, text)
    return table


def _memory(forecast: Forecast, title: str, stages: Sequence[str]) -> Table:
    most = forecast.peak()[1]
    unit, size = _unit(most)
    table = _table(f"peak memory of each stage in {unit}, {title}")
    table.add_column("", no_wrap=True)
    memory = {stage: forecast.memory[stage] for stage in stages}
    for stage, terms in memory.items():
        table.add_column(stage, justify="right", no_wrap=True, style="bold" if device_bytes(terms) == most else "")

    def add_rows(terms: Iterable[str]) -> None:
        for term in terms:
            sizes = [stage.get(term, 0) / size for stage in memory.values()]
            if max(sizes) >= SHOWN:
                table.add_row(term, *(f"{part:,.2f}" if part >= SHOWN else "" for part in sizes))

    add_rows(TERMS)
    table.add_section()
    table.add_row("total", *(f"{device_bytes(terms) / size:,.2f}" for terms in memory.values()))
    table.add_section()
    add_rows(f"{term}{HOST}" for term in TERMS)
    return table


def _peak(forecast: Forecast, room: float | None) -> Text:
    stage, most = forecast.peak()
    unit, size = _unit(most)
    host = max(host_bytes(terms) for terms in forecast.memory.values())
    peak = (
        f"The peak is {most / size:,.2f} {unit}, in the stage {stage}; in CPU memory there are up to "
        f"{host / size:,.2f} {unit} besides."
    )
    if room is None:
        return Text(peak)
    left = room - most / GIB
    fits = f"It fits in {room:g} GiB and leaves {left:,.2f}." if left >= 0 else f"It is {-left:,.2f} over {room:g} GiB."
    return Text.assemble(f"{peak} ", (fits, "green" if left >= 0 else "bold red"))


def _offload(savings: Iterable[Saving], forecast: Forecast) -> Table:
    unit, size = _unit(forecast.peak()[1])
    table = _table(f"offload options that are not set, in {unit}")
    for title in ("", "peak", "saves at most", "in the stage", "in CPU memory besides"):
        table.add_column(title, justify="right" if title in ("peak", "saves at most") else "left", no_wrap=True)
    for override, peak, stage, saved, host in savings:
        table.add_row(override, f"{peak / size:,.2f}", f"{saved / size:,.2f}", stage, f"{host / size:,.2f}")
    return table


def _unit(most: int) -> tuple[str, int]:
    return ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)


def _table(title: str) -> Table:
    return titled_table(title, padding=(0, 0, 0, 1), pad_edge=False)


def savings(job: PlanJob, config: dict[str, Any], launched: int, forecast: Forecast) -> Iterator[Saving]:
    """Plans the run with each option; one that the config does not allow is left out.

    Args:
        job: of the plan.
        config: of the plan, without the option.
        launched: number of processes of this launch.
        forecast: of the plan.
    """
    host = max(map(host_bytes, forecast.memory.values()))
    for name, value in job.strategy.options.unset_offloads():
        try:
            other = PlanJob({**config, "strategy": {**config["strategy"], name: value}}, launched).forecast()
        except ValueError:  # all else in the config is right
            continue
        saved = {
            stage: device_bytes(terms) - device_bytes(other.memory[stage]) for stage, terms in forecast.memory.items()
        }
        stage = max(saved, key=saved.__getitem__)
        added = max(map(host_bytes, other.memory.values())) - host
        yield Saving(f"strategy.{name}={str(value).lower()}", other.peak()[1], stage, saved[stage], added)
