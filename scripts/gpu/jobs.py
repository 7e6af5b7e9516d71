"""Configs of command lines, and short training runs through `python -m rft.main`."""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.checks import FailedError, Setting

Rows = list[dict[str, Any]]
SHAPES: dict[str, dict[str, int]] = {  # of models of random weights
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    | {"num_attention_heads": 2, "num_key_value_heads": 1},
    "small": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "medium": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "head_dim": 64}
    | {"num_attention_heads": 16, "num_key_value_heads": 8},
}
STEPS = 5
SFT = (
    "algorithm=sft",
    "algorithm.source.response=demonstration",
    "data.train.length=[50,200]",
    "data.eval.heldout.count=8",
    "actor.model_config.max_position_embeddings=1024",
    "batch.prompts=16",
    f"steps={STEPS}",
    "eval.every=0",
    "eval.at_start=false",
    "eval.loss=true",
)


def sft(shape: str) -> list[str]:
    """Overrides of supervised training on rows of 100 to 400 tokens, packed: the same rows in every run."""
    return [*SFT, *(f"actor.model_config.{name}={value}" for name, value in SHAPES[shape].items())]


def compose_config(overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved config of a command line, as plain containers."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from rft.main import CONFIG_FOLDER
    from rft.train.folder.settled import settle

    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        config = compose("main", list(overrides))
    settle(config)
    whole: Any = OmegaConf.to_container(config, resolve=True)
    whole.pop("hydra", None)
    return whole


def run_job(folder: Path, overrides: Sequence[str]) -> Rows:
    """Runs a job in `<folder>/run`; returns the rows of its metrics, one for each step.

    Raises:
        FailedError: the job ended with an error; the message is its last line.
    """
    job = start_job(folder, overrides)
    status, said = job.wait(), log_of(folder)
    sys.stdout.write(said)
    if status:
        raise FailedError(last_error(said) or f"the job ended with status {status}")
    return rows_of(folder)


def start_job(folder: Path, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a job in `<folder>/run`, unless its overrides say so it does not resume; see `log_of`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "rft.main", "resume=never", *overrides, f"output_dir={folder / 'run'}"]
    with (folder / "log.txt").open("w") as stream:
        return subprocess.Popen(command, cwd=folder, stdout=stream, stderr=subprocess.STDOUT)


def log_of(folder: Path) -> str:
    """What the last job of a folder has printed."""
    return (folder / "log.txt").read_text(errors="replace")


def rows_of(folder: Path) -> Rows:
    """The rows of the metrics of the job in a folder, one for each step."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]


def last_error(output: str) -> str:
    """The last line of an output that names an error, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if "error:" in line.lower() or "Error" in line.split(":")[0]]
    return (named or lines or [""])[-1].removeprefix("[rank0]:").strip()[:600]


def reference(setting: Setting, name: str, overrides: Sequence[str]) -> Rows:
    """The rows of a run that several checks compare with; the first of them makes it."""
    folder = setting.folder.parent / f"reference_{name}"
    if (folder / "run" / "result.json").exists():
        return rows_of(folder)
    return run_job(folder, overrides)


def compare(rows: Rows, expected: Rows, loss: float, gradient: float) -> dict[str, float]:
    """Relative differences of the losses of all steps and of the first gradient norm.

    Args:
        loss, gradient: the largest differences that pass.

    Raises:
        FailedError: a step is missing, a loss is not finite, or a difference is too large.
    """
    if len(rows) != len(expected):
        raise FailedError(f"{len(rows)} steps instead of {len(expected)}")
    if not all(math.isfinite(row["loss/nll"]) for row in rows):
        raise FailedError("a loss is not finite")
    pairs = list(zip(rows, expected, strict=True))
    norms = [row for row in rows if "grad_norm" in row]  # a skipped update has none
    if not norms:
        raise FailedError("no update was made")
    found = {"loss_difference": max(abs(row["loss/nll"] / other["loss/nll"] - 1) for row, other in pairs)}
    if norms[0] is rows[0]:
        found["gradient_difference"] = abs(rows[0]["grad_norm"] / expected[0]["grad_norm"] - 1)
    for name, most in (("loss_difference", loss), ("gradient_difference", gradient)):
        if name in found and not found[name] <= most:
            raise FailedError(f"{name.replace('_', ' ')} {found[name]:.2g}, more than {most:g}")
    return found | measured(rows)


def measured(rows: Rows) -> dict[str, float]:
    """Speed after the first step, and peak memory."""
    later = [row["throughput/tokens_per_s"] for row in rows[1:]]
    return {"tokens_per_s": statistics.median(later), "memory_gib": max(row["memory/peak_gib"] for row in rows)}


def figure(numbers: dict[str, float]) -> str:
    """The numbers of `compare` in one line."""
    parts = [f"loss differs by {numbers['loss_difference']:.1e}"]
    if "gradient_difference" in numbers:
        parts.append(f"gradient norm by {numbers['gradient_difference']:.1e}")
    return ", ".join([*parts, f"{numbers['tokens_per_s']:,.0f} tokens/s", f"{numbers['memory_gib']:.2f} GiB"])
