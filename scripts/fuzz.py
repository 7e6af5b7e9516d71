"""Tries random input from outside: rows of data, responses, answers of servers. None of it may end a run.

python scripts/fuzz.py                               # each kind for 20 seconds
python scripts/fuzz.py responses --seconds 600
python scripts/fuzz.py --seed 0 --inputs 5000        # the same inputs each time, as .ci/run tries them
python scripts/fuzz.py rows --seed 7 --only 4211     # one input again, with the whole traceback

The seed, which is printed, and the number of an input decide what it is. Ends with status 1 where an input has another
outcome than those that the kind allows; see the modules of scripts/fuzzing.
"""

import argparse
import logging
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType, ModuleType

from fuzzing import answers, responses, rows

KINDS: dict[str, ModuleType] = {"rows": rows, "responses": responses, "answers": answers}
LONGEST_S = 30  # of one input, on a machine that does other things
MOST_BYTES = 8 * 2**30  # of memory: an input that asks for more fails, and does not end other processes
SHOWN = 5  # inputs that fail, in full


def main(arguments: list[str] | None = None) -> int:
    """Runs the script; returns its status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="all, unless some are named")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each kind")
    parser.add_argument("--inputs", type=int, default=None, help="of each kind, however long they take")
    parser.add_argument("--seed", type=int, default=None, help="drawn from the clock, unless it is given")
    parser.add_argument("--only", type=int, default=None, help="the number of an input: tries this one alone")
    chosen = parser.parse_args(arguments)
    seed = time.time_ns() % 1_000_000_007 if chosen.seed is None else chosen.seed
    failed = 0
    with _quiet():
        for kind in chosen.kinds or KINDS:
            if chosen.only is None:
                failed += fuzz(kind, seed, chosen.seconds, chosen.inputs)
            else:
                failed += try_one(kind, seed, chosen.only)
    return 1 if failed else 0


def fuzz(kind: str, seed: int, seconds: float, inputs: int | None = None) -> int:
    """Tries inputs of a kind, so many if the number is given, else for so long; returns how many failed."""
    started, number, failed = time.monotonic(), 0, 0
    causes: set[str] = set()
    while number < inputs if inputs is not None else time.monotonic() - started < seconds:
        if error := fault(kind, seed, number):
            failed += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            cause = f"{last.filename}:{last.lineno} {KINDS[kind].title(KINDS[kind].make(Random(f'{seed}/{number}')))}"
            if cause not in causes and len(causes) < SHOWN:
                say(f"{kind}: seed {seed}, input {number}: {type(error).__name__}: {error!s:.1000}")
                say(f"    python scripts/fuzz.py {kind} --seed {seed} --only {number}")
            causes.add(cause)
        number += 1
    say(f"{kind}: seed {seed}, {number:,} inputs in {time.monotonic() - started:.0f} s, {failed} failed")
    return failed


def try_one(kind: str, seed: int, number: int) -> int:
    """Prints an input and what it raises; returns 1 if it fails."""
    say(repr(KINDS[kind].make(Random(f"{seed}/{number}"))))
    if error := fault(kind, seed, number):
        traceback.print_exception(error)
    return 0 if error is None else 1


def fault(kind: str, seed: int, number: int) -> BaseException | None:
    """What an input raises; None if its outcome is one of those that are allowed."""
    made = KINDS[kind].make(Random(f"{seed}/{number}"))
    signal.alarm(LONGEST_S)
    try:
        KINDS[kind].check(made)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit, too
        return error
    finally:
        signal.alarm(0)
    return None


def say(text: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, and an alarm ends an input that takes too long."""
    logging.disable(logging.WARNING)
    before = signal.signal(signal.SIGALRM, _too_long)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        logging.disable(logging.NOTSET)


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"an input took more than {LONGEST_S} s")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    sys.exit(main())
