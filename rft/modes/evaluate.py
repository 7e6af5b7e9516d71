"""`mode=evaluate`: the numbers of an evaluation in training, of any checkpoint or model, with confidence intervals."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rft.evaluation.base import Measured, summary
from rft.evaluation.estimators import interval
from rft.evaluation.generation import Answered
from rft.logger.history import short, write_atomically
from rft.modes.model import Answering, display
from rft.reward.compose import WeightedSum
from rft.setup.datasets import fit_held_out
from rft.train.run_folder import ANSWERS, EVALUATION


def evaluate(config: dict[str, Any], console: Console) -> float:
    """Evaluates the held-out sets, prints a table, and writes `evaluation.json` and `answers.jsonl` to output_dir.

    Args:
        config: the resolved config as plain containers.
        console: of rank zero.

    Returns:
        The value of the metric that the config names.

    Raises:
        ValueError: what is wrong with the config, the data or the checkpoint.
    """
    job = Answering(config)
    run, check = job.run, job.check
    job.find(run.evaluate.checkpoint, "evaluate.checkpoint")
    sets = job.load_held_out()
    fit_held_out(sets, job.lengths(job.world, job.encoder), run, check, job.shape, console.print)
    check.end()
    with job.measuring(sets) as held_out, display(job.world, console) as shown:
        found = held_out.measure(shown.progress)
    numbers = summary(found)
    if job.world.rank == 0:
        folder = Path(run.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        told = [{"set": name, **line} for name, measured in found.items() for line in lines(measured, job.reward)]
        write_atomically(folder / ANSWERS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in told))
        sampled = {
            "seed": run.seed,
            "samples": run.eval.samples,
            "temperature": run.eval.temperature,
            "max_new_tokens": run.rollout.max_new_tokens,
        }
        report = {"model": job.title, **(sampled if job.grader is None else {}), "numbers": numbers}
        report |= {"intervals": {name: intervals(measured) for name, measured in found.items()}}
        write_atomically(folder / EVALUATION, json.dumps(report, indent=1, ensure_ascii=False))
        console.print(table(job.title, found))
        console.print(f"written to {folder / EVALUATION} and {folder / ANSWERS}", highlight=False, soft_wrap=True)
    return numbers[run.metric]


def lines(measured: Measured, reward: WeightedSum) -> list[dict[str, Any]]:
    """What was looked at in a set; of answers, how the reward took them."""
    return answers(measured, reward) if isinstance(measured, Answered) else measured.texts()


def answers(answered: Answered, reward: WeightedSum) -> list[dict[str, Any]]:
    """What was answered to each prompt of a set, and how the reward took it."""
    lines = []
    for number, (row, greedy) in enumerate(zip(answered.rows, answered.greedy, strict=True)):
        line = {"prompt": row["prompt"], **{field: row[field] for field in reward.fields}}
        line |= {"response": greedy.texts[0], "extracted": greedy.extracted[0]}
        line |= {"score": answered.values["accuracy"][number]}
        if answered.drawn:
            drawn = answered.drawn[number]
            every = zip(drawn.texts, drawn.extracted, drawn.terms[reward.accuracy], strict=True)
            line["samples"] = [{"response": text, "extracted": what, "score": score} for text, what, score in every]
        lines.append(line)
    return lines


def intervals(measured: Measured) -> dict[str, dict[str, list[float]]]:
    """[low, high] of 95 % of every number, of the whole set ("all") and of each of its sources."""
    return {
        source or "all": {name: list(interval(theirs)) for name, theirs in values.items()}
        for source, values in measured.parts().items()
    }


def table(title: str, sets: Mapping[str, Measured]) -> Table:
    """The numbers as a person reads them."""
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in ("set", "number"):
        drawn.add_column(column)
    for column in ("count", "value", "95 % interval"):
        drawn.add_column(column, justify="right")
    for name, measured in sets.items():
        for source, values in measured.parts().items():
            for number, theirs in values.items():
                low, high = interval(theirs)
                where = f"{name}/{source}" if source else name
                mean = sum(theirs) / len(theirs)
                drawn.add_row(where, number, str(len(theirs)), short(mean), f"{short(low)} to {short(high)}")
    return drawn
