"""One process writes a run folder: the lock that it holds."""

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Self, TextIO

from rft.logger.disk import naming_file

LOCK = "run.lock"  # in the run folder: host and process id of the process that has it open


class RunLock:
    """The lock of a run folder: `flock` on its file `run.lock`, which rank 0 keeps open until the run ends.

    The system frees the lock when the process ends for any reason, so that the file of a dead process blocks nothing.
    On NFS the lock holds between hosts if the mount supports locks: Linux sends `flock` to the server as a byte-range
    lock (flock(2)).

    As a context manager it is free again after the block.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def take(self, folder: Path) -> str:
        """Takes the lock of a folder.

        Returns:
            A message for the user if the file system has no locks, else an empty text.

        Raises:
            ValueError: another process has it; names its host and id.
        """
        file = (folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise ValueError(_occupied(folder, file)) from None
        except OSError as error:
            file.close()
            return f"{folder}: its file system has no locks ({error}); make sure that no second process runs in it"
        with naming_file(folder / LOCK):
            file.truncate(0)
            file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
            file.flush()
        self._file = file
        return ""

    def release(self) -> None:
        """Frees the lock, if it is taken."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _occupied(folder: Path, file: TextIO) -> str:
    file.seek(0)
    text = file.read()
    holder = json.loads(text) if text else {"host": "another host", "pid": "another process"}  # it writes them next
    return (
        f"output_dir: {folder} is in use by process {holder['pid']} on {holder['host']}. Two processes would mix their "
        "files: wait until it ends, end it, or start another run with resume=never or another output_dir"
    )
