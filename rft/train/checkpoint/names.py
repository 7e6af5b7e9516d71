"""Names of the folders of checkpoints, and how these folders are renamed and removed."""

import re
import shutil
from pathlib import Path

from rft.logger.disk import make_folder

STEP = re.compile(r"step_\d{8,}")


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path | None) -> int:
    """The step of a checkpoint, from the name of its folder; 0 for the beginning of a run."""
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("step_"))


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; folders with other names are none."""
    return sorted(path for path in folder.glob("step_*") if path.is_dir() and STEP.fullmatch(path.name))


def set_aside(folder: Path) -> str:
    """Renames a folder to a free name, and returns it."""
    free = folder.with_name(f"damaged_{folder.name}")
    while free.exists():
        free = free.with_name(f"{free.name}_again")
    return folder.rename(free).name


def make_empty(folder: Path) -> None:
    delete(folder)
    make_folder(folder)


def remove(folder: Path) -> None:
    """Removes a checkpoint; a kill in between leaves a folder that does not look like one."""
    doomed = folder.with_name(f".{folder.name}.removed")
    delete(doomed)
    folder.rename(doomed)
    delete(doomed)


def delete(path: Path) -> None:
    """Deletes a folder with its content, a file or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
