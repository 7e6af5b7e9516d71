"""The folder of a run: continued where it holds an unfinished run of the same config, a free one otherwise."""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

CONFIG = "config.yaml"
RESULT = "result.json"  # written when a run has ended well


def choose_folder(wanted: Path, config: dict[str, Any], resume: bool) -> tuple[Path, str]:
    """Picks the folder and writes the resolved config into it.

    Args:
        wanted: the folder that the config names.
        config: the resolved config.
        resume: whether an unfinished run may be continued.

    Returns:
        The folder, and a sentence for the user where it is not simply the one that was wanted.

    Raises:
        ValueError: the folder cannot be made.
    """
    folder, number = wanted, 1
    while folder.exists() and (folder.is_file() or any(folder.iterdir())):
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
    """Marks a run as ended well, with the last value of every number."""
    partial = folder / f".{RESULT}.partial"
    partial.write_text(json.dumps(numbers, indent=1, sort_keys=True))
    partial.rename(folder / RESULT)


def _unfinished(folder: Path, config: dict[str, Any]) -> bool:
    if not (folder / CONFIG).is_file() or (folder / RESULT).exists():
        return False
    theirs = OmegaConf.load(folder / CONFIG)
    ours = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(config)))
    return all(theirs.get(key) == ours.get(key) for key in {*theirs, *ours} - {"resume"})
