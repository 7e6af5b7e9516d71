"""A logger as its yaml builds it, and a short run whose numbers and texts its backend is compared with."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from rich.console import Console

import rft
from rft.data.encode.media.folder import store_media
from rft.logger.console import RunConsole
from rft.logger.history import History, read_lines, trajectory_files
from rft.logger.log import RunLog, Sink
from rft.registry import Target
from tests.data.media_parts import BLUE, RED, image, text, user

TEXTS: list[dict[str, Any]] = [
    {"set": "train", "prompt": "reverse 12=", "response": "Größe 21\n", "score": 1.0, "reward/format": 0.5},
    {"set": "eval/held", "prompt": "reverse 34=", "response": "", "score": 0.0},
]


def build(name: str, **options: Any) -> Any:
    """The logger of `logger=<name>` with options beside those of the yaml."""
    path = Path(rft.__file__).parent / "config" / "logger" / f"{name}.yaml"
    node: Any = OmegaConf.to_container(OmegaConf.load(path))
    return Target(node[name] | options, f"logger.{name}").build()


def media_rows(run: Path) -> list[dict[str, Any]]:
    """Written rows with two pictures, with a sound, and without media, whose files are in the run folder."""
    sound = {"type": "audio", "audio": {"array": np.zeros(80, np.float32), "sampling_rate": 8000}}
    prompts = ([user([image(RED), image(BLUE), text("?")])], [user([sound])], "plain")
    rows = [{"prompt": prompt, "response": "a", "score": 1.0} for prompt in prompts]
    return [store_media(row, run, run / "trajectories") for row in rows]


def write_run(run: Path, sink: Sink, first: int) -> None:
    """Logs the steps `first` and `first + 1` and the texts of the second; begins after step `first - 1`."""
    sink.check()
    with RunLog(run, {"seed": 7}, [sink], RunConsole(Console(file=io.StringIO()))) as log:
        log.rewind(first - 1)
        log.log(first, "train", {"eval/held/pass@2": 0.25 + first, "lr": 1e-6})
        log.log(first + 1, "train", {"reward/mean": 0.5 + first})
        log.samples(first + 1, TEXTS)


def numbers_of(run: Path) -> dict[tuple[str, int], float]:
    """{(metric, step): value} of `metrics.jsonl`."""
    history = History.of(run)
    return {(name, step): value for name in history.names for step, value in history.points(name) if value is not None}


def texts_of(run: Path) -> dict[int, list[dict[str, Any]]]:
    """{step: rows} of `trajectories/`."""
    return {step: list(read_lines(path)) for step, path in trajectory_files(run)}
