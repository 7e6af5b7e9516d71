"""Writes the rows of this recipe: of the parquet files of hiyouga/geometry3k, or generated ones of the same fields.

A generated problem asks for the width or the height of a rectangle in units of 8 pixels, from 1 to 4.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from rft.data.encode.media.folder import write_rows
from rft.data.rows.lazy import Rows
from rft.data.rows.sources import FileRows

FIELDS = ["prompt", "answer"]
SIDE, UNIT = 32, 8  # pixels of an image, and of a unit of length


def of_file(path: str) -> Rows:
    """The problems of a file with the columns `images`, `problem` (with a marker <image> for each) and `answer`."""
    return FileRows(path, {"prompt": "problem"}, None, None, "the parquet file").load(FIELDS)


def generated(count: int) -> list[dict[str, Any]]:
    """Different problems about a rectangle."""
    rng, drawn = random.Random(0), dict[tuple[Any, ...], None]()
    while len(drawn) < count:
        width, height = rng.randint(1, 4), rng.randint(1, 4)
        left, top = rng.randint(0, SIDE - UNIT * width), rng.randint(0, SIDE - UNIT * height)
        drawn.setdefault((rng.choice(("width", "height")), width, height, left, top, rng.randint(128, 255)))
    return [problem(*one) for one in drawn]


def problem(asked: str, width: int, height: int, left: int, top: int, shade: int) -> dict[str, Any]:
    """One of them; `left` and `top` are the pixels of its corner, and `shade` its grey."""
    picture = Image.new("RGB", (SIDE, SIDE))
    picture.paste((shade, shade, shade), (left, top, left + UNIT * width, top + UNIT * height))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": f"find the {asked}"}]
    return {"prompt": [{"role": "user", "content": content}], "answer": str(width if asked == "width" else height)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="gets train.jsonl and test.jsonl with their images")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--parquet", nargs=2, metavar=("TRAIN", "TEST"), help="files of hiyouga/geometry3k")
    source.add_argument("--generated", type=int, metavar="N", help="generates N problems to train on, and N/8 to test")
    given = parser.parse_args(words)
    sets: list[Rows]
    if given.parquet:
        sets = [of_file(path) for path in given.parquet]
    else:
        rows = generated(given.generated + given.generated // 8)
        sets = [rows[: given.generated], rows[given.generated :]]
    for name, part in zip(("train", "test"), sets, strict=True):
        file = given.folder / f"{name}.jsonl"
        Console().print(f"{file}: {write_rows(part, FIELDS, file)} rows")


if __name__ == "__main__":
    main()
