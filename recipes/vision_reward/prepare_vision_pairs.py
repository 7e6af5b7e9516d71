"""Writes the pairs of this recipe: of parquet files of openbmb/RLAIF-V-Dataset, or generated ones of the same fields.

A generated pair is about the shapes of rft's own visual task: the right answer is better than another one.
"""

import argparse
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from rft.data.encode.media.folder import write_rows
from rft.data.encode.tasks.shapes import Shapes
from rft.data.rows.lazy import Row, Rows
from rft.data.rows.sources import FileRows

FIELDS = ["prompt", "chosen", "rejected"]
HELD_OUT = 50  # the pairs of one of fifty questions are held out


def of_files(paths: Sequence[str], held_out: bool) -> Iterator[Row]:
    """The pairs of files with the columns `image`, `question`, `chosen` and `rejected`, split by the question."""
    for row in FileRows(list(paths), {"prompt": "question"}, None, None, "the parquet files").load(FIELDS):
        if (zlib.crc32(row["question"].encode()) % HELD_OUT == 0) == held_out:
            yield row


def generated(held_out: bool, count: int) -> Rows:
    """Pairs about the colour of a shape; training and held-out ones share no image."""
    split = "heldout" if held_out else "train"
    return Shapes("shapes", split, count, ["colour"], (1, 1), (32, 32), 0.0, int(held_out)).load(FIELDS)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="gets train.jsonl and test.jsonl with their images")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--parquet", nargs="+", metavar="FILE", help="files of openbmb/RLAIF-V-Dataset")
    source.add_argument("--generated", type=int, metavar="N", help="generates N pairs to train on, and N/8 to test")
    given = parser.parse_args(words)
    for name in ("train", "test"):
        held_out, count, file = name == "test", given.generated, given.folder / f"{name}.jsonl"
        rows: Iterable[Row] = (
            of_files(given.parquet, held_out)
            if given.parquet
            else generated(held_out, count // 8 if held_out else count)
        )
        Console().print(f"{file}: {write_rows(rows, FIELDS, file)} rows")


if __name__ == "__main__":
    main()
