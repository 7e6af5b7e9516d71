"""The message of a run that is out of memory: the phase of the step, its largest term, and the keys that lower it."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

import torch

from rft.errors import same_command
from rft.strategy.base import HOST
from rft.train.stage import Phase
from rft.train.trainer import Trainer

GIB = 2**30
QUOTE = '"'  # around a text in JSON, which yaml needs not
ALLOCATOR = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")  # in the text of a RuntimeError
TOKENS = "actor.micro_batch_tokens"
ROWS = ("rollout.engine.max_rows", "rollout.engine_args.gpu_memory_utilization")
LOWER = {  # keys whose lower value takes less memory in a phase, where the config has them
    Phase.ROLLOUT: ROWS,
    Phase.COLUMNS: (TOKENS,),
    Phase.UPDATE: (TOKENS,),
    Phase.PUBLISH: ROWS[1:],
    Phase.EVALUATION: (*ROWS, TOKENS),
}
FULL = {"strategy.activation_checkpointing": "full"}
STAGES = {  # of mode=plan, for each phase
    Phase.BEGIN: ("load", "begin"),
    Phase.COLUMNS: ("columns",),
    Phase.UPDATE: ("update",),
    Phase.PUBLISH: ("publish",),
    Phase.EVALUATION: ("evaluate",),
    Phase.CHECKPOINT: ("export", "save"),
    Phase.ROLLOUT: ("rollout",),
}
# Phases that mode=plan counts together for a warm-up.
OF_STAGE = (Phase.COLUMNS, Phase.UPDATE, Phase.PUBLISH, Phase.CHECKPOINT)
CURES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # keys to lower and keys to set, for a term of mode=plan
    "weights": ((), {"strategy.param_offload": "all"}),
    "gradients": ((), {"strategy.param_offload": "all"}),
    "optimizer": ((), {"strategy.optimizer_offload": True}),
    "ema": ((), {"actor.ema": None}),
    "other models": ((), {"strategy.param_offload": "frozen"}),
    "gathered": ((), {"strategy.reshard_after_forward": True}),
    "activations": ((TOKENS,), FULL),
    "logits": ((TOKENS,), {}),
    "kv cache": (ROWS, {}),
    "batch": (("batch.prompts",), {}),
    f"weights{HOST}": ((), {"strategy.param_offload": "none"}),
    f"optimizer{HOST}": ((), {"strategy.optimizer_offload": False}),
    f"activations{HOST}": ((TOKENS,), {"strategy.activation_offload": False}),
}
Memory = dict[str, dict[str, int]]  # bytes of every term of each stage of mode=plan
MakePlan = Callable[[Mapping[str, Any], int], Memory | None]  # from the config and the number of ranks


class Largest(NamedTuple):
    """The largest term of the memory of a phase.

    Attributes:
        term: as mode=plan names it.
        size: its bytes.
        total: bytes of all terms of the phase.
    """

    term: str
    size: int
    total: int


def no_plan(config: Mapping[str, Any], ranks: int) -> Memory | None:
    """Plans nothing: the message names the keys of the phase alone."""
    return None


@contextmanager
def explain_out_of_memory(trainer: Trainer, config: Mapping[str, Any], make_plan: MakePlan) -> Iterator[None]:
    """A failed allocation in the block becomes a ValueError that names the phase, its largest term, and the keys.

    Args:
        trainer: its phase is the one in which the allocation has failed.
        config: the resolved config.
        make_plan: plans the memory of the run; None for a run that cannot be planned.
    """
    try:
        yield
    except (RuntimeError, MemoryError, ValueError) as error:  # a function of the user wraps it in a ValueError
        errors = chain(error)
        if not any(map(is_out_of_memory, errors)):
            raise
        phase, plan = trainer.phase, make_plan(config, trainer.world.size)
        on_cpu = trainer.world.device.type == "cpu"
        counted = (False, True) if on_cpu else (not any(map(_is_of_device, errors)),)
        largest = None if plan is None else largest_term(plan, phase, trainer.stage, counted)
        raise ValueError(
            f"rank {trainer.world.rank} is out of memory in the phase {phase} of step {trainer.step} "
            f"({str(error).splitlines()[0]}). {advice(phase, config, largest, on_cpu)}"
        ) from error


def largest_term(plan: Memory, phase: Phase, stage: str, on_host: tuple[bool, ...]) -> Largest | None:
    """The largest term of a phase; None where the plan has no such phase.

    Args:
        stage: the name of the stage of the run.
        on_host: whether terms in CPU memory count (True), those on the device (False), or both.
    """
    stages = (stage,) if phase in OF_STAGE and stage in plan else STAGES[phase]
    found = [
        {term: size for term, size in plan[name].items() if term.endswith(HOST) in on_host}
        for name in stages
        if name in plan
    ]
    terms = max(found, key=lambda terms: sum(terms.values()), default={})
    if not terms:
        return None
    term = max(terms, key=lambda term: terms[term])
    return Largest(term, terms[term], sum(terms.values()))


def advice(phase: Phase, config: Mapping[str, Any], largest: Largest | None, on_cpu: bool) -> str:
    """What lowers the memory of a phase, and the term that is to be lowered.

    Args:
        config: the resolved config.
        largest: the largest term of the phase; None if it is not known.
        on_cpu: the run computes on the CPU, where an offload moves nothing.
    """
    lower, change, sentence = LOWER.get(phase, ()), FULL if phase is Phase.UPDATE else {}, ""
    if largest is not None:
        lower, change = CURES.get(largest.term, ((), {}))
        change = {key: value for key, value in change.items() if not (on_cpu and key.endswith("_offload"))}
        sentence = (
            f"By its plan, {largest.total / GIB:.3g} GiB, the largest term of this phase is {largest.term} with "
            f"{largest.size / GIB:.3g} GiB. "
        )
    cure = ", or ".join(_spell(lower, change, config)) or "take a smaller model, or more ranks"
    plan = same_command("plan")
    return f"{sentence}{cure[0].upper()}{cure[1:]}. This command prints the memory by term, the largest first: {plan}"


def _spell(lower: tuple[str, ...], change: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """The changes that are possible: keys that the config has, and values that it does not have yet."""
    for key in lower:
        if (value := reduce(_below, key.split("."), config)) is not None:
            yield f"lower {key}={value}"
    for key, new in change.items():
        if (value := reduce(_below, key.split("."), config)) not in (None, new):
            yield f"set {key}={json.dumps(new).strip(QUOTE)} (now {json.dumps(value).strip(QUOTE)})"


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


def _is_of_device(error: BaseException) -> bool:
    """Whether an allocation on a GPU has failed."""
    return isinstance(error, torch.OutOfMemoryError) or ALLOCATOR[1] in str(error)


def _below(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, Mapping) else None
