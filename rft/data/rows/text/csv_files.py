"""Files of csv."""

import csv
import io
from collections.abc import Iterable, Iterator

from rft.data.rows.lazy import Row
from rft.data.rows.text.base import TextFile, mark_size, size

LONGEST_CELL = 2**31 - 1  # characters; the default of the csv module is 131,072


class CsvFile(TextFile):
    """A csv file whose first line names the fields. Cells are text, never numbers; empty cells are null.

    `scan` raises a ValueError if a line has more or fewer cells than the first, or is not csv in UTF-8, or the first
    line names a field twice; it names the line.
    """

    def scan(self) -> Iterator[tuple[int, int, Row]]:
        """See `TextFile.scan`."""
        csv.field_size_limit(LONGEST_CELL)
        with self.file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
            end, first = mark_size(self.file), 1

            def read() -> Iterator[str]:
                nonlocal end
                for line in _checked(lines, self.path):
                    end += size(line)
                    yield line

            reader = csv.reader(read(), strict=True)
            try:
                names = self._names = next(reader, [])
                if len(set(names)) < len(names):
                    twice = next(name for name in names if names.count(name) > 1)
                    raise ValueError(f"{self.path} line 1: the field {twice!r:.60} is named twice; rename one")
                self.begin, first = end, reader.line_num + 1
                for cells in reader:
                    if cells and len(cells) != len(names):
                        where = self.place(reader.line_num)
                        raise ValueError(f"{where}: {len(cells)} cells, but line 1 names {len(names)} fields")
                    if cells:
                        yield reader.line_num, end, self._row(cells)
                    first = reader.line_num + 1
            except csv.Error as error:
                raise ValueError(
                    f"{self.path} line {first}: not csv in UTF-8 ({error}); close every quote, and write a quote in a "
                    "cell twice"
                ) from error

    def parse(self, data: bytes) -> Row:
        """See `TextFile.parse`."""
        reader = csv.reader(io.StringIO(data.decode(), newline=""), strict=True)
        return self._row(next(cells for cells in reader if cells))

    def _row(self, cells: list[str]) -> Row:
        return {name: cell or None for name, cell in zip(self._names, cells, strict=True)}


def _checked(lines: Iterable[str], path: str) -> Iterator[str]:
    """The lines of a file that was opened with surrogateescape, which holds bytes that are not UTF-8 in a line."""
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise ValueError(f"{path} line {number}: not csv in UTF-8 (a NUL byte); write the file again")
        if not line.isascii():
            try:
                line.encode()
            except UnicodeEncodeError as error:
                byte = ord(line[error.start]) - 0xDC00
                raise ValueError(
                    f"{path} line {number}: not UTF-8 (byte {byte:#04x}); save the file in UTF-8"
                ) from None
        yield line
