"""The folder of a run: an unfinished run of the same config is continued, otherwise a free folder is taken."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from omegaconf import OmegaConf

from rft.distributed import World

CONFIG = "config.yaml"
RESULT = "result.json"  # written when a run has ended well
EVALUATION, ANSWERS = "evaluation.json", "answers.jsonl"  # of mode=evaluate
RESCORED, RESCORED_ANSWERS = "rescored.json", "rescored.jsonl"  # of mode=evaluate with evaluate.responses


def choose_folder(wanted: Path, config: dict[str, Any], resume: bool) -> tuple[Path, str]:
    """Picks the folder and writes the resolved config into it.

    Args:
        wanted: the folder that the config names.
        config: the resolved config.
        resume: whether an unfinished run may be continued.

    Returns:
        The folder, and a message for the user unless it is the wanted folder itself.

    Raises:
        ValueError: the folder cannot be made.
    """
    folder, number = wanted, 1
    while _taken(folder):
        if resume and _unfinished(folder, config):
            return folder, f"{folder} holds an unfinished run of this config: continuing it"
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output_dir: the folder {folder} cannot be made ({error}); set output_dir") from error
    (folder / CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    return folder, "" if folder == wanted else f"{wanted} is taken: this run is in {folder}"


def finish_folder(folder: Path, numbers: dict[str, float]) -> None:
    """Marks a run as finished: writes the last value of every metric."""
    partial = folder / f".{RESULT}.partial"
    partial.write_text(json.dumps(numbers, indent=1, sort_keys=True))
    partial.rename(folder / RESULT)


@contextmanager
def scratch(world: World, output_dir: str, mode: str) -> Iterator[Path]:
    """A temporary folder beside the run folder, on the same file system, removed after the block. A collective."""
    folder: Path = world.decide(lambda: _beside(Path(output_dir).parent, mode))
    try:
        yield folder
    finally:
        if world.rank == 0:
            shutil.rmtree(folder)


def _beside(parent: Path, mode: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    return Path(mkdtemp(prefix=f"{mode}-", dir=parent))


def _taken(folder: Path) -> bool:
    """Whether the folder holds files; those of an evaluation before the run do not count."""
    if not folder.is_dir():
        return folder.exists()
    return any(path.name not in (EVALUATION, ANSWERS, RESCORED, RESCORED_ANSWERS) for path in folder.iterdir())


def _unfinished(folder: Path, config: dict[str, Any]) -> bool:
    if not (folder / CONFIG).is_file() or (folder / RESULT).exists():
        return False
    saved = OmegaConf.load(folder / CONFIG)
    current = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(config)))
    return all(saved.get(key) == current.get(key) for key in {*saved, *current} - {"resume", "cache"})
