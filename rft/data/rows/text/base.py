"""Files of rows in a text format, and their rows, which are read from the file again when they are indexed."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from functools import lru_cache
from io import FileIO
from itertools import islice
from os import fstat, pread
from pathlib import Path
from typing import ClassVar
from zlib import crc32

from rft.data.rows.lazy import ConvertRow, LazyRows, Row

Located = tuple[str, Row]  # (file and line for messages, row)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
OPEN_FILES = 64  # that a process holds open; a data set may have more files than a process may open


def check_file(path: str, key: str) -> Path:
    """The file of that path.

    Raises:
        ValueError: it does not exist or is a folder; names `key`.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        found = "it is a folder" if file.is_dir() else "there is no such file"
        raise ValueError(f"{key}={path}: {found}; give the path of a file")
    return file


def read_text(path: str, key: str) -> str:
    """The text of a file.

    Raises:
        ValueError: there is no such file, or it is not in UTF-8; names `key`.
    """
    return decoded(check_file(path, key).read_bytes(), f"{key}={path}")


class TextFile(ABC):
    """A file of rows in a text format.

    Args:
        path: of the file.
        key: the yaml key that names it.

    Attributes:
        path, file: as messages name it, and where it is.
        begin: the byte behind which the rows stand; known when the first row is read.

    Raises:
        ValueError: there is no such file; names the key.
    """

    counted: ClassVar[str] = "line"  # what messages count in the file

    def __init__(self, path: str, key: str) -> None:
        self.path = path
        self.file = check_file(path, key)
        self.begin = 0

    @abstractmethod
    def scan(self) -> Iterator[tuple[int, int, Row]]:
        """Reads all rows, as (line or row from 1, byte behind the row, row). The bytes of a row begin behind those of
        the row before it.

        Raises:
            ValueError: the file is not of its format; names the line or the row.
        """

    @abstractmethod
    def parse(self, data: bytes) -> Row:
        """The row that has these bytes in the file, as `scan` has read it."""

    def place(self, number: int) -> str:
        """The place of a row for messages: "<path> line <n>"."""
        return f"{self.path} {self.counted} {number}"

    def rows(self) -> Iterator[Located]:
        """Reads all rows, each with its place; raises what `scan` raises."""
        return ((self.place(number), row) for number, _, row in self.scan())


class TextRows(LazyRows):
    """Rows of a text file. 20 bytes a row are in memory: where it stands, and a checksum of its bytes.

    Args:
        file: is read once, to its end or to `limit`.
        check: converts a row, and raises a ValueError if the run cannot use it; is called once for each.
        convert: converts a row that has been checked.
        limit: takes the first `limit` rows, or all if None.
    """

    def __init__(self, file: TextFile, check: ConvertRow, convert: ConvertRow, limit: int | None) -> None:
        ends, lines, sums = array("q"), array("q"), array("I")
        with file.file.open("rb") as same:
            state = fstat(same.fileno())
            for line, end, raw in islice(file.scan(), limit):
                check(file.place(line), raw)
                begin = ends[-1] if ends else same.seek(file.begin)
                sums.append(crc32(same.read(end - begin)))
                ends.append(end)
                lines.append(line)
        identity = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)

        def where(number: int) -> str:
            return file.place(lines[number])

        def read(number: int) -> Row:
            begin = ends[number - 1] if number else file.begin
            try:
                data = pread(_opened(file.file, identity).fileno(), ends[number] - begin, begin)
            except OSError as error:
                raise ValueError(f"{where(number)}: the file cannot be read again ({error}); restore it") from error
            if crc32(data) != sums[number]:
                raise ValueError(
                    f"{where(number)}: the row has changed since the run began; restore the file, and continue the run"
                )
            return convert(where(number), file.parse(data))

        super().__init__(len(ends), read, where)


class _Handle(FileIO):
    """A file that closes itself when the last reference to it is gone."""

    def __del__(self) -> None:
        self.close()


@lru_cache(OPEN_FILES)
def _opened(path: Path, identity: tuple[int, ...]) -> _Handle:
    """The file; `identity` is another one if the path has another file."""
    return _Handle(path)


def decoded(data: bytes, where: str) -> str:
    """The text of bytes in UTF-8, without a byte order mark.

    Raises:
        ValueError: they are not UTF-8; names the place.
    """
    try:
        return data.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: {not_utf8(error)}") from None


def not_utf8(error: UnicodeDecodeError) -> str:
    """A message about bytes that are not UTF-8, with their line if there are several."""
    line = error.object[: error.start].count(b"\n") + 1
    at = f" in line {line}" if line > 1 else ""
    return f"not UTF-8 (byte {error.object[error.start]:#04x}{at}); save the file in UTF-8"


def size(text: str) -> int:
    """The bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def mark_size(file: Path) -> int:
    """The bytes of the byte order mark at the beginning of a file; 0 without one."""
    with file.open("rb") as opened:
        return len(BYTE_ORDER_MARK) * (opened.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK)
