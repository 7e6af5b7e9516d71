"""One side of the section `data`: `python data_side.py rft|datasets <jsonl file> <folder of the cache> <json file>`."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets

from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Lengths
from rft.data.encode.tokenizer import characters
from rft.data.processes import cores
from rft.data.rows.sources import FileRows
from rft.distributed import SINGLE_PROCESS

TOKENIZER = characters(alphabet="0123456789+=: ")


def main(side: str, file: str, cache: str, out: str) -> None:
    """Measures a side and writes its numbers."""
    datasets.disable_progress_bars()
    load, count = {"rft": (load_rft, count_rft), "datasets": (load_datasets, count_datasets)}[side]
    numbers: dict[str, float] = {}
    before = private_memory()
    with timed(numbers, "load_s"):
        rows = load(file, cache)
    with timed(numbers, "count_s"):
        tokens = count(rows)
    with timed(numbers, "read_s"):
        characters_read = sum(len(row["prompt"]) for row in rows)
    assert tokens == characters_read, "each character of a prompt is a token"
    numbers["row_bytes"] = (private_memory() - before) / len(rows)
    Path(out).write_text(json.dumps(numbers))


def load_rft(file: str, cache: str) -> Any:
    """Rows as a run loads them; they have no cache."""
    return FileRows(file, {}, None, None, "data.train").load(["answer", "prompt"])


def count_rft(rows: Any) -> int:
    """All tokens of the prompts, without a cache."""
    return int(Lengths(SINGLE_PROCESS, Encoder(TOKENIZER, "none", None), None).prompts(rows).sum())


def load_datasets(file: str, cache: str) -> Any:
    """The table of the package."""
    return datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)


def count_datasets(rows: Any) -> int:
    """All tokens of the prompts, by `map`."""

    def tokens(batch: dict[str, list[str]]) -> dict[str, list[int]]:
        return {"tokens": [len(ids) for ids in TOKENIZER(batch["prompt"]).input_ids]}

    counted = rows.map(tokens, batched=True, num_proc=cores(), remove_columns=rows.column_names)
    return sum(counted["tokens"])


@contextmanager
def timed(numbers: dict[str, float], name: str) -> Iterator[None]:
    """Writes the seconds of the block under a name."""
    began = time.perf_counter()
    yield
    numbers[name] = time.perf_counter() - began


def private_memory() -> int:
    """Bytes of this process in memory that are no parts of files."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
