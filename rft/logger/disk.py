"""Writes files, names of files and folders in such an order that a power cut leaves the old content or the new one.

A file system may write names to the disk before the content that they name. So the content is synced before a name
leads to it, and the folder is synced after the name has changed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Waits until a file, or the names of a folder's files, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(path: Path, name: Path) -> None:
    """Gives a file or folder, whose content is on the disk, another name in the same folder; replaces a file."""
    os.replace(path, name)
    sync(name.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write in the block. After it, the file is on the disk under the name `path`."""
    partial = path.with_name(f".{path.name}.partial")
    yield partial
    sync(partial)
    rename(partial, path)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those around it that do not exist, and waits until their names are on the disk."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync(made.parent)
