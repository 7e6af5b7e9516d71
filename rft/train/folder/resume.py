"""Which keys of a config may differ between a run and the command that continues it."""

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

LISTED = 4  # keys in a message
ABSENT = "no such key"

# Keys whose value changes no weight, each with the reason; a pattern holds for all keys below it. All other keys are
# compared.
CHANGES_NOTHING = {
    # where the run is, and when its process ends
    "name": "part of the default of output_dir",
    "output_dir": "the command has found the folder",
    "resume": "chooses the folder",
    "max_time": "ends the process, not the run",
    "cache": "token counts are equal with and without it",
    "depends_on": "checked at the start; other keys name the files that are read",
    # what the run writes
    "logger": "copies the numbers to further places",
    "checkpoint": "which checkpoints are written and kept",
    "trajectories": "which texts are written",
    "profile": "which steps are traced",
    "eval.every": "an evaluation changes no weight",
    "eval.at_start": "an evaluation changes no weight",
    # what other modes read
    **{
        mode: f"read by mode={mode}"
        for mode in ("plan", "inspect", "verify", "serve", "evaluate", "generate", "chat", "replay")
    },
    # how ranks and devices share the work: the same sums in another order
    "batch.balance": "which rank computes a row",
    "*.micro_batch_tokens": "which rows are computed together",
    "strategy.device": "where the run computes",
    "strategy.replicas": "how ranks share the weights",
    "strategy.context_parallel": "how ranks share a sequence",
    "strategy.tensor_parallel": "how ranks share a matrix",
    "strategy.expert_parallel": "how ranks share experts",
    "strategy.reshard_after_forward": "how long gathered blocks are held",
    "strategy.accumulate": "when gradients are reduced",
    "strategy.activation_checkpointing": "what the backward pass recomputes",
    "strategy.attention": "which kernel computes the attention of packed rows",
    "strategy.cudnn_attention": "which kernel computes attention",
    "strategy.deterministic": "which kernels compute",
    "strategy.compile": "how blocks are executed",
    "strategy.peak_tflops": "the scale of throughput/mfu",
    # servers, and where the memory is
    "strategy.param_offload": "where the weights are",
    "strategy.optimizer_offload": "where the optimizer state is",
    "strategy.activation_offload": "where activations are until the backward pass",
    "*.token": "the name of the variable with the key of servers",
    "rollout.engine.servers": "which servers sample, and how long they may take",
    "rollout.engine.sleep_level": "where the engine's weights are while the policy trains",
    "rollout.engine_args.gpu_memory_utilization": "memory of the engine",
    "*.addresses": "which servers answer",
    "*.call.concurrency": "calls at the same time",
    "reward.offload": "where reward models are while they do not compute",
    "reward.shard": "how ranks share reward models",
    # what ends a run with an error, or keeps it from that
    "faults": "what happens from now on after a fault; every step before had none, or its policy",
    "reward.max_unscored": "when the run stops",
    "reward.canary": "when the run stops",
}
# The number of steps: it changes weights only if a learning rate depends on it, see `Optimizer.decays`.
STEPS = ("steps", "epochs")
# Keys that decide what a checkpoint holds. `resume=fork` and `resume=<path>` compare these alone: the first by value,
# the second by which keys they have and which of them are null.
NEEDED_VALUES = ("*.model_config", "*.head", "*.lora", "actor.tokenizer", "*.optimizer.name",
                 "algorithm.source._target_", "data.streaming")  # fmt: skip
NEEDED_KEYS = ("warmup", "algorithm.terms", "algorithm.shaping", "algorithm.reward_kl", "algorithm.critic_loss",
               "algorithm.prm_loss")  # fmt: skip

Difference = tuple[str, Any, Any]  # key, value of the run, value of the command


def changed_keys(saved: Mapping[str, Any], current: Mapping[str, Any], unread: Collection[str]) -> list[Difference]:
    """The keys that a run and the command do not share and that change its weights.

    Args:
        saved, current: the config of the run, and that of the command.
        unread: further keys that change nothing, because the run does not read them.
    """
    free = (*CHANGES_NOTHING, *unread)
    return [found for found in _differences(saved, current) if not below(found[0], free)]


def unloadable_keys(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """The keys in which a config differs from that of a checkpoint so that it cannot be loaded."""
    values = [found for found in _differences(saved, current) if below(found[0], NEEDED_VALUES)]
    keys = [found for found in _differences(_outline(saved), _outline(current)) if below(found[0], NEEDED_KEYS)]
    return [found for found in values + keys if not below(found[0], ["reward"])]  # its models are in no checkpoint


def below(key: str, patterns: Collection[str]) -> bool:
    """True if a pattern matches the key or a node above it."""
    names = key.split(".")
    above = [".".join(names[: count + 1]) for count in range(len(names))]
    return any(fnmatchcase(name, pattern) for name in above for pattern in patterns)


def describe_changes(changes: list[Difference]) -> str:
    """The keys with both values."""
    shown = [f"{key} ({_spell(old)} there, {_spell(new)} here{_why(key)})" for key, old, new in changes[:LISTED]]
    more = len(changes) - LISTED
    return ", ".join(shown) + (f" and {more} other keys" if more > 0 else "")


def overrides(changes: list[Difference]) -> str:
    """The overrides that give a command the values of the run; empty if they are too many, or of other nodes."""
    if len(changes) > LISTED or any(ABSENT in (old, new) for _, old, new in changes):
        return ""
    return " ".join(shlex.quote(f"{key}={_spell(old)}") for key, old, _ in changes)


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    old, new = dict(leaves(saved)), dict(leaves(current))
    pairs = [(key, old.get(key, ABSENT), new.get(key, ABSENT)) for key in {**old, **new}]
    changed = [(key, one, other) for key, one, other in pairs if one != other]
    above = {key.rpartition(".")[0] for key, _, _ in changed}
    return [change for change in changed if change[0] not in above]  # a null that has keys on the other side


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values of a tree of mappings; an empty mapping is a value."""
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name}".lstrip("."))
    else:
        yield key, node


def _outline(node: Any) -> Any:
    """A config with `set` in place of every value that is not null."""
    if isinstance(node, Mapping):
        return {name: _outline(value) for name, value in node.items()}
    return node if node is None else "set"


def _why(key: str) -> str:
    return "; a learning rate decays over the steps" if key in STEPS else ""


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
