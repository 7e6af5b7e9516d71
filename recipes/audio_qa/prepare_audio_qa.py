"""Writes the rows of this recipe: of parquet files with columns `audio`, `question` and `answer`, or generated ones.

A generated row asks for the pitch of the tones of rft's own audio task.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rft.data.encode.media.folder import write_rows
from rft.data.encode.tasks.tones import Tones
from rft.data.rows.lazy import Rows
from rft.data.rows.sources import FileRows

FIELDS = ["prompt", "answer"]


def of_file(path: str) -> Rows:
    """The rows of a file. A value of `audio` is a path, or `{bytes, path}` as the package datasets writes it."""
    return FileRows(path, {"prompt": "question"}, None, None, "the parquet file").load(FIELDS)


def generated(held_out: bool, count: int) -> Rows:
    """Different rows; training and held-out ones share no sound."""
    split = "heldout" if held_out else "train"
    return Tones("tones", split, count, ["pitch"], (0.08, 0.12), 16000, 0.0, int(held_out)).load(FIELDS)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="gets train.jsonl and test.jsonl with their sounds")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--parquet", nargs=2, metavar=("TRAIN", "TEST"), help="files such as those of ClothoAQA")
    source.add_argument("--generated", type=int, metavar="N", help="generates N rows to train on, and N/8 to test")
    given = parser.parse_args(words)
    for number, name in enumerate(("train", "test")):
        file = given.folder / f"{name}.jsonl"
        count = (given.generated or 0) // (8 if number else 1)
        rows = of_file(given.parquet[number]) if given.parquet else generated(bool(number), count)
        Console().print(f"{file}: {write_rows(rows, FIELDS, file)} rows")


if __name__ == "__main__":
    main()
