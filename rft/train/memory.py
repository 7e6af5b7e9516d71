"""The message of a run that is out of memory: the phase of the step, and the keys that lower its memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from traceback import walk_tb
from typing import Any

import torch

from rft.errors import same_command
from rft.train.trainer import Trainer

ALLOCATOR = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")  # in the text of a RuntimeError
PHASES = {  # the methods of the trainer whose work is a phase; the rest of `Trainer.fit` samples and scores
    Trainer.begin.__code__: "start of a stage",
    Trainer.compute_columns.__code__: "annotate",
    Trainer.update.__code__: "update",
    Trainer.check_weights.__code__: "update",
    Trainer.publish.__code__: "refresh",
    Trainer.evaluate.__code__: "evaluation",
    Trainer.probe.__code__: "evaluation",
    Trainer.save.__code__: "checkpoint",
}
TOKENS = "actor.micro_batch_tokens"
ROWS = ("rollout.engine.max_rows", "rollout.engine_args.gpu_memory_utilization")
LOWER = {  # keys whose lower value takes less memory in a phase, where the config has them
    "rollout": ROWS,
    "annotate": (TOKENS,),
    "update": (TOKENS,),
    "refresh": ROWS[1:],
    "evaluation": (*ROWS, TOKENS),
}


@contextmanager
def explain_out_of_memory(trainer: Trainer, config: Mapping[str, Any]) -> Iterator[None]:
    """A failed allocation in the block becomes a ValueError that names the phase, the keys and their values.

    Args:
        trainer: its methods are the phases.
        config: the resolved config.
    """
    try:
        yield
    except (RuntimeError, MemoryError, ValueError) as error:  # a function of the user wraps it in a ValueError
        errors = chain(error)
        if not any(map(is_out_of_memory, errors)):
            raise
        phase = phase_of(errors)
        raise ValueError(
            f"rank {trainer.world.rank} is out of memory in the phase {phase} of step {trainer.step} "
            f"({str(error).splitlines()[0]}). {advice(phase, config)}"
        ) from error


def advice(phase: str, config: Mapping[str, Any]) -> str:
    """What lowers the memory of a phase.

    Args:
        config: the resolved config.
    """
    values = {key: reduce(_below, key.split("."), config) for key in LOWER.get(phase, ())}
    found = [f"lower {key}={value}" for key, value in values.items() if value is not None]
    saved = _below(config["strategy"], "activation_checkpointing")
    if phase == "update" and saved not in (None, "full"):
        found.append(f"set strategy.activation_checkpointing=full (now {saved})")
    cures = ", or ".join(found) or "take a smaller model, or more ranks"
    plan = same_command("plan")
    return f"{cures[0].upper()}{cures[1:]}. This command prints the memory by term, the largest first: {plan}"


def chain(error: BaseException) -> list[BaseException]:
    """An error, and all errors during whose handling it was raised."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and one not in found:
            found.append(one)
            left += [one.__context__, one.__cause__]
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ALLOCATOR)


def phase_of(errors: list[BaseException]) -> str:
    """The phase in which the errors were raised."""
    codes = [frame.f_code for error in errors for frame, _ in walk_tb(error.__traceback__)]
    return next((PHASES[code] for code in codes if code in PHASES), "rollout")


def _below(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, Mapping) else None
