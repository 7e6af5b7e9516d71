"""Work on all rows of a large data set, in several processes of this machine."""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from rft.logger.console import work_progress
from rft.waits import waiting
from rft.worker.fork_server import end_with_parent

CHUNK = 1024  # rows that are read at once
FORKED = 16_384  # fewer rows take less time than it takes to start processes
MOST = 16  # processes: each needs memory of its own
CHUNK_S = 3600.0  # seconds; processes that finish no chunk for so long do not answer
TOKENIZERS_PARALLELISM = "TOKENIZERS_PARALLELISM"
Made = TypeVar("Made")


def in_chunks(name: str, count: int, work: Callable[[range], Made]) -> list[Made]:
    """Calls a function for every chunk of the numbers below `count`, and returns what it makes of them, in order.

    From `FORKED` numbers on, forked processes share the chunks, and the console shows how far they are. The function
    then changes nothing in this process. It must not use a GPU.

    Args:
        name: of the work, for the console.
        work: takes consecutive numbers, at most `CHUNK`.

    Raises:
        ValueError: that of the first chunk for which `work` raises one.
        RuntimeError: a process has ended, such as one that was killed because memory was used up; or a chunk is not
            done `CHUNK_S` seconds after the one before.
    """
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    if count < FORKED:
        return [work(chunk) for chunk in chunks]
    made = list[Made]()
    with _mapped(name, work, chunks) as found, work_progress(name, count) as show:
        for chunk, result in zip(chunks, found, strict=True):
            made.append(result)
            show(chunk.stop)
    return made


@contextmanager
def _mapped(name: str, work: Callable[[range], Made], chunks: list[range]) -> Iterator[Iterator[Made]]:
    """The results of all chunks, in order, of as many processes as this rank has cores."""
    processes = min(cores(), MOST, len(chunks))
    if processes == 1:
        yield map(work, chunks)
        return
    before = os.environ.get(TOKENIZERS_PARALLELISM)
    # forked processes have none of the threads of this one: tokenizers and torch must not wait for them
    os.environ[TOKENIZERS_PARALLELISM] = "false"
    given, others = (work, os.getpid()), {*active_children()}
    executor = ProcessPoolExecutor(processes, get_context("fork"), initializer=_Child.begin, initargs=given)
    try:
        yield _results(name, [(chunk, executor.submit(_Child.run, chunk)) for chunk in chunks], others)
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of {processes} processes that read the rows has ended, maybe killed for its memory; free memory, or "
            "run on fewer cores (taskset --cpu-list 0 starts none)"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)
        if before is None:
            del os.environ[TOKENIZERS_PARALLELISM]
        else:
            os.environ[TOKENIZERS_PARALLELISM] = before


def _results(name: str, futures: list[tuple[range, Future[Made]]], others: set[BaseProcess]) -> Iterator[Made]:
    """The results of chunks, in order; ends the processes, which are no `others`, where one does not come."""
    for chunk, future in futures:
        rows = f"rows {chunk.start + 1} to {chunk.stop}"
        try:
            with waiting(f"{name}: the run waits for the processes that read {rows}", name):
                result = future.result(CHUNK_S)
        except TimeoutError as error:
            if future.done():  # it is an error of the work
                raise
            for process in {*active_children()} - others:
                process.kill()
            raise RuntimeError(
                f"the processes that read the rows have not done {rows} within {CHUNK_S:g} s; run on fewer cores "
                "(taskset --cpu-list 0 starts none), or look for a file system that does not answer"
            ) from error
        yield result


class _Child:
    """What a forked process does. It inherits `work`, so that rows and functions need not be pickled."""

    work: Callable[[range], Any]

    @staticmethod
    def begin(work: Callable[[range], Any], parent: int) -> None:
        """Takes the work, and makes the process end when the run ends, also if the run is killed."""
        _Child.work = work
        end_with_parent(parent)
        torch.set_num_threads(1)

    @staticmethod
    def run(chunk: range) -> Any:
        """Does the work for one chunk."""
        return _Child.work(chunk)


def cores() -> int:
    """The cores that this rank may use; 1 where processes cannot be forked safely."""
    if sys.platform != "linux":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
