"""`mode=replay`: takes a step of a run again, then once more with the algorithm of the command, and compares both."""

from pathlib import Path
from typing import Any

from rich.console import Console

from rft.batch.columns import lengths
from rft.logger.redact import public_config
from rft.modes.replay.compare import CLOCK, compare, different, token_changes
from rft.modes.replay.recorder import ROW
from rft.modes.replay.report import Replayed, print_report, write_report
from rft.modes.replay.saved_run import ALGORITHM, SavedRun, check_columns_known
from rft.modes.replay.step import Replay, ReplayJob
from rft.modes.train import sweep_suffix
from rft.setup.assembly import Job
from rft.train.folder.run_folder import scratch


def replay(config: dict[str, Any], console: Console) -> float:
    """Prints how the step differs with the algorithm of the command, and writes the comparison into a folder.

    Args:
        config: the resolved config as plain containers: that of the run, with another algorithm.
        console: of rank zero.

    Returns:
        The largest difference between the gradients of a token.

    Raises:
        ValueError: lists all mistakes of the config; the run, its checkpoint or the step is not there; or a key differs
            that may not.
    """
    command = Job(config)
    options, folder = command.run.replay, Path(command.run.output_dir)
    if options.step is None:
        raise ValueError("mode=replay: set replay.step to the number of a step in metrics.jsonl")
    saved = SavedRun.of(folder)
    job = ReplayJob(config | {ALGORITHM: saved.config[ALGORITHM]})
    changes = saved.changes(public_config(command.config), job.run_command("").unread)
    check_columns_known(job, command)
    logged, (start, done) = saved.logged(options.step), saved.start(options.step)
    output = Path(options.output + sweep_suffix(config))
    world, loaded = job.begin()
    with scratch(world, command.run.output_dir, command.run.mode) as temporary:
        step = Replay(job, world, loaded, temporary, folder, start, output)
        try:
            step.prepare(options.step)
            run, other = step.take(None), step.take(command.algorithm)
        finally:
            step.close()
    again = {name: value for name, value in logged.items() if name in run.numbers and not name.startswith(CLOCK)}
    found = Replayed(
        step=options.step,
        run=folder,
        start=start,
        retaken=options.step - 1 - done,
        changes=changes,
        unequal=different(again, {name: run.numbers[name] for name in again}),
        equal=len(again),
        numbers=different(run.numbers, other.numbers),
        updates=compare(run.record, other.record),
        tokens=token_changes(run.record, other.record),
    )
    texts = zip(step.rows[ROW].tolist(), step.rows["tokens", "input_ids"].tolist(), lengths(step.rows), strict=True)
    local = {row: tokens[:length] for row, tokens, length in texts}
    ids = {row: tokens for part in world.gather(local) for row, tokens in part.items()}
    if world.rank == 0:
        spell = loaded.tokenizer.decode
        print_report(found, options.tokens, ids, spell, console)
        write_report(output, found, ids, spell)
        console.print(f"written: {output}", soft_wrap=True)
    return max((abs(token.run - token.command) for token in found.tokens), default=0.0)
