"""Trains every algorithm on the built-in task, and writes what the docs say about it from the registries and the yamls.

python scripts/atlas.py measure                       # every algorithm that is not measured yet, three seeds each
python scripts/atlas.py measure --only grpo,dapo      # these, whether they are or not
python scripts/atlas.py measure --only gdpo "reward/terms=[exact_match,format]"   # with overrides of their own
python scripts/atlas.py pages                         # tables, facts and curves in docs/, and docs/reference.md
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import tempfile
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from reference.atlas_pages import RESULTS, Algorithm, algorithms, models_beside, pages, write_pages
from reference.atlas_tables import resolved
from reference.page import PAGE, page
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

SEEDS = (0, 1, 2)
# The model of what is measured and printed in docs/algorithms, which the default has become another than.
WARM_UP = ["actor.model_config.head_dim=24", "actor.tokenizer.alphabet='0123456789 =adeorstubl'"]
TEACHER = [*WARM_UP, "algorithm=sft", "batch.prompts=128"]  # accuracy 1.00, for those that learn from one
SETTINGS = ["steps=24", "batch.prompts=16", "batch.minibatches=2", "eval.every=4"]
ACCURACY, REWARD = "eval/heldout/accuracy", "reward/mean"
DIGITS = 4


def main() -> None:
    """Runs the section that the command line names."""
    parser = argparse.ArgumentParser(description="Measures and documents the algorithms.")
    sections = parser.add_subparsers(dest="section", required=True, metavar="section")
    part = sections.add_parser("measure", help=f"trains every algorithm and writes {RESULTS.name}")
    part.add_argument("--only", default="", help="names, with commas; measured again where they are known")
    part.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each (default: 1)")
    part.add_argument("--out", type=Path, default=RESULTS, help="where the numbers go")
    part.add_argument("overrides", nargs="*", help="of these algorithms, beside those that all share")
    part.set_defaults(run=measure)
    part = sections.add_parser("pages", help="writes the generated parts of docs/")
    part.set_defaults(run=lambda arguments: write_pages(pages() | {PAGE: page()}))
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except (ValueError, RuntimeError) as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="bold red"))
        raise SystemExit(1) from None


def measure(arguments: argparse.Namespace, seeds: tuple[int, ...] = SEEDS) -> None:
    """Trains, and writes the file of results after every run.

    Raises:
        ValueError: an algorithm has no yaml.
        RuntimeError: runs failed; the others are measured.
    """
    console = Console()
    results = read_results(arguments.out)
    chosen = [name for name in arguments.only.split(",") if name]
    if unknown := set(chosen) - set(algorithms()):
        raise ValueError(f"--only {','.join(sorted(unknown))}: no such algorithm (known: {', '.join(algorithms())})")
    for name in chosen:
        results["algorithms"].pop(name, None)
    runs_to_do = todo(results, chosen, seeds)
    results |= {"settings": SETTINGS, "versions": {name: importlib.metadata.version(name) for name in ("torch",)}}
    failed: list[str] = []
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="rft-atlas-") as folder,
        ProcessPoolExecutor(arguments.jobs, context, initializer=one_thread) as pool,
        Progress(console=console) as progress,
    ):
        bar = progress.add_task("warm-up", total=len(runs_to_do))
        needed = sorted({seed for _, seed in runs_to_do})
        warm = [[f"seed={seed}", *WARM_UP, f"output_dir={folder}/start-{seed}"] for seed in needed]
        starts = dict(zip(needed, pool.map(warm_up, warm), strict=True))
        taught = {
            name for name in {name for name, _ in runs_to_do} if "teacher" in models_beside(Algorithm.read(name).job)
        }
        teacher = pool.submit(train_teacher, f"{folder}/teacher").result() if taught else ""
        runs: dict[Future, tuple[str, int]] = {}
        for name, seed in runs_to_do:
            overrides = [f"algorithm={name}", f"seed={seed}", *SETTINGS, *starts[seed], *arguments.overrides]
            overrides += [teacher] if name in taught else []
            runs[pool.submit(train, f"{folder}/{name}-{seed}", overrides)] = name, seed
        for future in as_completed(runs):
            name, seed = runs[future]
            problem = future.exception()
            progress.update(bar, advance=1, description=f"{name} {seed}")
            if problem is not None:
                failed.append(f"{name}, seed {seed}: {type(problem).__name__}: {problem}")
                console.print(failed[-1], style="red", markup=False)
                continue
            run, metrics = future.result()
            entry = results["algorithms"].setdefault(
                name, {"overrides": arguments.overrides, "metrics": [], "runs": {}}
            )
            entry["metrics"] = sorted({*entry["metrics"], *metrics})
            entry["runs"][str(seed)] = run
            write_results(arguments.out, results)
            accuracy = run["accuracy"]
            console.print(f"{name}, seed {seed}: {accuracy[0][1]:.2f} -> {accuracy[-1][1]:.2f}", highlight=False)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(runs_to_do)} runs failed:\n" + "\n".join(failed))


def todo(results: dict[str, Any], chosen: list[str], seeds: tuple[int, ...]) -> list[tuple[str, int]]:
    """(algorithm, seed) of the runs that are not in the results yet."""
    return [
        (name, seed)
        for name in chosen or algorithms()
        for seed in seeds
        if str(seed) not in results["algorithms"].get(name, {}).get("runs", {})
    ]


def one_thread() -> None:
    """Prepares a process of the pool: runs side by side would wait for each other's threads."""
    import torch

    torch.set_num_threads(1)


def warm_up(overrides: list[str]) -> list[str]:
    """Runs the supervised stage of the default run, for all algorithms at once; returns what starts from there."""
    config = resolved(*overrides, "steps=1")
    fit(config)
    model = f"{config['output_dir']}/checkpoints/step_{config['warmup']['steps']:08d}/actor"
    return ["warmup=none", f"actor.path={model}", "actor.model_config=null"]


def train_teacher(folder: str) -> str:
    """Trains a teacher in a folder; returns what names it."""
    fit(resolved(*TEACHER, f"output_dir={folder}"))
    return f"teacher.path={folder}/checkpoints/latest/actor"


def train(folder: str, overrides: list[str]) -> tuple[dict[str, Any], list[str]]:
    """A run in a folder: accuracy and mean reward as [step, value], and the names of all that it logged."""
    from rft.logger.history import History

    fit(resolved(*overrides, f"output_dir={folder}"))
    history = History.of(Path(folder))
    curves = {
        part: [[step, round(value, DIGITS)] for step, value in history.points(name) if value is not None]
        for part, name in (("accuracy", ACCURACY), ("reward", REWARD))
    }
    return curves, history.names


def fit(config: dict[str, Any]) -> None:
    """Runs a job in this process and keeps to itself what it says."""
    from rft.setup.assembly import Job

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        Job(config).fit("")


def read_results(path: Path) -> dict[str, Any]:
    """What was measured so far; nothing where there is no file."""
    return json.loads(path.read_text()) if path.exists() else {"algorithms": {}}


def write_results(path: Path, results: dict[str, Any]) -> None:
    """One line per algorithm, in the order of their names."""
    head = {key: value for key, value in results.items() if key != "algorithms"}
    lines = [f'"{name}": {json.dumps(entry)}' for name, entry in sorted(results["algorithms"].items())]
    text = json.dumps(head)[:-1] + ', "algorithms": {\n' + ",\n".join(lines) + "\n}}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main()
