"""`mode=generate`: completions of a file of prompts, in its order. An interrupted command resumes.

The output is written chunk by chunk. `<output>.origin.json` beside it records all settings that the texts depend on;
resuming with another input or setting is an error. Chunk size and number of processes may change.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from rft.data.encode.limits import check_lengths
from rft.data.encode.media.files import whole_file
from rft.data.encode.media.folder import store_media
from rft.data.encode.media.normal import normalize_media, with_data_urls
from rft.data.row_checks import refuse_agents
from rft.data.rows.files import find_files, read_rows
from rft.data.rows.lazy import Row, Rows
from rft.data.rows.sources import check_text, require
from rft.logger.disk import append
from rft.logger.history import write_atomically
from rft.modes.model import Answering, display
from rft.rollout.engine.base import Completion, Request, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler

KEY = "generate.input"


def generate(config: dict[str, Any], console: Console) -> float:
    """Writes the rows of `generate.input`, each with its `completions`, to `generate.output`.

    Args:
        config: the resolved config as plain containers.
        console: of rank zero.

    Returns:
        The number of rows in the output.

    Raises:
        ValueError: lists all mistakes of the config, the input and the checkpoint, or names the key whose value the
            existing output was not made with.
    """
    job = Answering(config)
    job.world = job.join()
    with job.watchdog(job.world):
        return complete_rows(job, console)


def complete_rows(job: Answering, console: Console) -> float:
    """Reads the input and the model, and writes the rows that the output lacks; otherwise as `generate`."""
    options, check = job.run.generate, job.check
    job.find(options.checkpoint, "generate.checkpoint")
    rows: list[Row] = []
    prompts: list[list[int]] = []

    def encode() -> None:
        rows.extend(read(options.input, options.prompt))
        prompts.extend(job.policy.encoder.prompts([{"prompt": row[options.prompt]} for row in rows]))
        check_lengths(KEY, list(map(len, prompts)), job.policy.context, job.run.rollout.max_new_tokens)

    check.run(encode)
    check.end()
    world, output, total = job.world, Path(options.output), len(rows)
    done: int = world.decide(lambda: resume(output, origin(job), options.chunk, total))
    with display(world, console) as shown:
        if done:
            shown.message(f"{output} holds {done} of {total} rows: resuming after them")
        if done < total:
            with job.started() as sampler, shown.progress("generate", total) as show:
                complete(job, sampler, rows, prompts, done, show)
        shown.message(f"{total} rows, completed by {job.title}, are in {output}")
    return float(total)


def complete(
    job: Answering, sampler: Sampler, rows: Rows, prompts: list[list[int]], done: int, show: Callable[[int], None]
) -> None:
    """Completes the rows after the first `done`, chunk by chunk; all ranks sample, and rank zero writes."""
    run, options, world = job.run, job.run.generate, job.world
    sampling = run.rollout.untruncated(0.0) if options.greedy else run.rollout
    for start in range(done, len(rows), options.chunk):
        end = min(start + options.chunk, len(rows))
        local_rows = range(start + world.rank, end, world.size)
        requests = [
            Request(prompts[number], [row_seed(run.seed, number, sample) for sample in range(options.samples)])
            for number in local_rows
        ]
        groups = dict(zip(local_rows, sampler.generate(requests, sampling), strict=True))
        all_rows = {number: group for rank_groups in world.gather(groups) for number, group in rank_groups.items()}
        if world.rank == 0:
            output = Path(options.output)
            lines = (output_row(rows[number], all_rows[number], output.parent) for number in range(start, end))
            append(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in lines).encode())
        show(end)


def output_row(row: Row, completions: list[Completion], folder: Path) -> Row:
    """A row of the output: the row of the input with its completions.

    Args:
        folder: of the output. The bytes of media become files of `media/` in it.
    """
    texts = [{"text": c.text, "tokens": len(c.tokens), "finish_reason": c.finish_reason} for c in completions]
    return store_media(row, folder, folder, whole_file) | {"completions": texts}


def read(path: str | None, field: str) -> Rows:
    """The rows of the input.

    Raises:
        ValueError: there is no such file, it holds no rows, or a row has no prompt that is text; names the key.
    """
    if path is None:
        raise ValueError("generate.input is null: give the path of a file with prompts (jsonl, json, csv or parquet)")
    rows = []
    for file in find_files(path, KEY):
        for where, row in read_rows(file, KEY):
            rows.append(checked(row, field, where, Path(file).parent))
    if not rows:
        raise ValueError(f"generate.input={path}: the file holds no rows")
    return rows


def checked(row: Row, field: str, where: str, folder: Path) -> Row:
    """A row of the input in the normal form of media.

    Args:
        field: of the prompt.
        where: the place of the row, for messages.
        folder: of its file.

    Raises:
        ValueError: as in `read`; names the place.
    """
    cure = "set generate.prompt to the name of the field that holds the prompt"
    require(row, field, where, cure)
    try:
        refuse_agents(row)
        row = normalize_media(row, folder, field)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    check_text(row[field], field, where, cure)
    try:
        json.dumps(with_data_urls(row))
    except TypeError as error:
        raise ValueError(f"{where}: the output is jsonl, which cannot hold a field ({error}); remove it") from error
    return row


def origin(job: Answering) -> dict[str, Any]:
    """The settings that the texts of the output depend on, by the keys of the yaml."""
    run, options = job.run, job.run.generate
    sampling = asdict(run.rollout)
    assert options.input is not None, "the input has been read"
    content = hashlib.sha256()
    for file in find_files(options.input, KEY):
        content.update(Path(file).expanduser().read_bytes())
    return {
        KEY: f"sha256 {content.hexdigest()}",
        "generate.checkpoint": job.title,
        "generate.prompt": options.prompt,
        "generate.samples": options.samples,
        "generate.greedy": options.greedy,
        "seed": run.seed,
        "data.template": run.data.template,
        "data.template_arguments": run.data.template_arguments,
        "data.system": run.data.system,
        "rollout.engine": run.rollout.engine["_target_"],
        **{f"rollout.{field.name}": sampling[field.name] for field in fields(Sampling)},
    }


def resume(output: Path, settings: dict[str, Any], chunk: int, total: int) -> int:
    """Creates the output, or truncates it to complete chunks; returns the number of rows that it then holds.

    Raises:
        ValueError: the output was written with another input or setting, or by another program; names the key.
    """
    origin_file = output.with_name(f"{output.name}.origin.json")
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(origin_file, json.dumps(settings, indent=1, ensure_ascii=False))
        output.touch()
        return 0
    if not origin_file.is_file():
        raise ValueError(
            f"generate.output={output}: the file exists, and mode=generate did not write it ({origin_file.name} is "
            "missing); choose another name, or delete the file"
        )
    recorded = json.loads(origin_file.read_text())
    for key, value in settings.items():
        if recorded.get(key) != value:
            raise ValueError(
                f"{key}: {output} was begun with {recorded.get(key)!r} and would continue with {value!r}; set "
                "generate.output to another file, or delete this one to start again"
            )
    ends = [0]  # of the lines, in bytes
    with output.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                ends.append(ends[-1] + len(line))
    complete_lines = len(ends) - 1
    kept = complete_lines if complete_lines >= total else complete_lines - complete_lines % chunk
    os.truncate(output, ends[kept])
    return kept
