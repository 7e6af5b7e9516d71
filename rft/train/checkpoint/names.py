"""Names of the folders of checkpoints, and how these folders are renamed and removed."""

import re
import shutil
from pathlib import Path

STEP = re.compile(r"step_\d{8,}")


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def set_aside(folder: Path) -> str:
    """Renames a folder to a free name, and returns it."""
    free = folder.with_name(f"damaged_{folder.name}")
    while free.exists():
        free = free.with_name(f"{free.name}_again")
    return folder.rename(free).name


def make_empty(folder: Path) -> None:
    delete(folder)
    folder.mkdir(parents=True)


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
