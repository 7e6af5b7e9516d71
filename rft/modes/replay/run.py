"""`mode=replay`: takes a step of a run again, then once more with the algorithm of the command, and compares both."""

from pathlib import Path
from typing import Any

from rich.console import Console

from rft.logger.redact import public_config
from rft.modes.replay.compare import compare
from rft.modes.replay.page import RowTexts
from rft.modes.replay.report import Origin, print_report, write_report, write_tokens
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
    options, run = command.run.replay, Path(command.run.output_dir)
    if (number := options.step) is None:
        raise ValueError("mode=replay: set replay.step to the number of a step in metrics.jsonl")
    saved = SavedRun.of(run)
    job = ReplayJob(config | {ALGORITHM: saved.config[ALGORITHM]})
    changes = saved.changes(public_config(command.config), job.run_command("").unread)
    check_columns_known(job, command)
    logged, output = saved.logged(number), Path(options.output + sweep_suffix(config))
    world = job.join()
    with job.watchdog(world):
        loaded = job.prepare(world)
        start, damaged = world.decide(lambda: saved.start(number))
        for path, problem in damaged.items():
            text = f"WARNING: the checkpoint {path} is damaged: {problem}; an earlier one is read"
            console.print(text, soft_wrap=True)
        with scratch(world, command.run.output_dir, command.run.mode) as temporary:
            step = Replay(job, world, loaded, temporary, run, start, output, number)
            try:
                step.prepare()
                own, other = step.take(None), step.take(command.algorithm)
            finally:
                step.close()
        origin, comparison = Origin(number, run, start, changes), compare(logged, own, other)
        texts = RowTexts(step.token_ids(), loaded.tokenizer.decode)
        if world.rank == 0:
            print_report(origin, comparison, options.tokens, texts, console)
            write_report(output, origin, comparison, texts)
            write_tokens(output, texts, own.record, other.record)
            console.print(f"written: {output}", soft_wrap=True)
        return max((abs(token.run - token.command) for token in comparison.tokens), default=0.0)
