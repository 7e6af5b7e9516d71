"""Writes files, names of files and folders in such an order that a power cut leaves the old content or the new one.

A file system may write names to the disk before the content that they name. So the content is synced before a name
leads to it, and the folder is synced after the name has changed.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOST_WAITING = 2**26  # bytes of records that wait in memory for space on the disk


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
def naming_file(path: Path) -> Iterator[None]:
    """An OSError of the block that names no file, as that of a full disk, names this one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write in the block. After it, the file is on the disk under the name `path`.

    Raises:
        OSError: the file could not be written; names `path`. The old file stays.
    """
    partial = path.with_name(f".{path.name}.partial")
    with naming_file(path):
        try:
            yield partial
            sync(partial)
            rename(partial, path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)  # it would take the space that is left
            raise


def write_text(path: Path, text: str) -> None:
    """Writes a file of text, which is whole and on the disk when it has its name. Raises as `replacing`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def append(path: Path, data: bytes) -> None:
    """Adds bytes to the end of a file, made if it is missing, and waits until they are on the disk.

    Raises:
        OSError: they could not be written; names `path`. The file is as before.
    """
    with naming_file(path):
        if not path.exists():
            path.touch()
            sync(path.parent)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            size = os.fstat(handle).st_size
            try:
                while data:
                    data = data[os.write(handle, data) :]
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)


class HeldFolder:
    """A folder that is held open, so that it is found out where another one, or none, has its name.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDONLY)  # the file system cannot give its number to another folder

    def moved(self) -> bool:
        """Whether the folder was removed or renamed."""
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._handle))
        except OSError:
            return True

    def close(self) -> None:
        """Lets the folder go."""
        os.close(self._handle)


class Records:
    """Writes the records of a run. Those that the disk does not take wait in memory and are tried again with the next.

    Args:
        warn: is called once when records begin to wait and once when the first ones are dropped, because more than
            `MOST_WAITING` bytes wait; names the file.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._waiting: deque[tuple[Path, bytes, bool]] = deque()  # file, content, whether it is all of the file
        self._warned: set[str] = set()

    def append(self, path: Path, text: str) -> None:
        """Adds a text to the end of a file."""
        self._add(path, text, False)

    def replace(self, path: Path, text: str) -> None:
        """Writes a file; makes its folder in the one around it, which only a run that was removed lacks."""
        self._add(path, text, True)

    def flush(self) -> str:
        """Writes what waits; why it still waits, with the name of the file, or an empty text."""
        try:
            while self._waiting:
                path, data, whole = self._waiting[0]
                if whole:
                    if not path.parent.exists():
                        path.parent.mkdir()
                        sync(path.parent.parent)
                    with replacing(path) as partial:
                        partial.write_bytes(data)
                else:
                    append(path, data)
                self._waiting.popleft()
        except OSError as error:
            return str(error)
        self._warned.clear()
        return ""

    def _add(self, path: Path, text: str, whole: bool) -> None:
        self._waiting.append((path, text.encode(), whole))
        if problem := self.flush():
            self._warn_once("wait", f"{problem}: records wait in memory, and are written once that is possible")
        while sum(len(data) for _, data, _ in self._waiting) > MOST_WAITING:
            first, _, _ = self._waiting.popleft()
            self._warn_once("lost", f"{problem}: too many records wait in memory; those of {first} are lost")

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)  # first: the warning is a record, too
            self._warn(text)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those around it that do not exist, and waits until their names are on the disk."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync(made.parent)
