"""Updates of a model with the shape of Qwen2.5-1.5B and random weights, drawn on the device once for all of them.

They show tokens per second, MFU, memory, waits for the device, and a profile.
"""

import gc
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from gpu.checks import Check, FailedError, Found, Setting
from gpu.machine import wait

TOKENS = 32768  # of an update
PROMPT = 64
SHORT = 160  # rows of an update of short rows
SLOWEST = 30  # rows of the profile
LENGTHS = {"8k": 8192, "2k": 2048, "short": TOKENS // SHORT, "32k": TOKENS}
ALGORITHMS = {"sft": ("algorithm=sft", "algorithm.source.response=demonstration"), "grpo": ("algorithm=grpo",)}
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": "true",
}
VOCABULARY = 151936
CPU = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
CPU_SCALE = 64  # an update has so many tokens fewer on a CPU
LONG = ("strategy.activation_checkpointing=full", f"actor.micro_batch_tokens={TOKENS}")  # for rows of more than 8k
WAITS = 4  # of an update for the device, at most, that are not in the step of the optimizer


@dataclass(frozen=True)
class Policy:
    """A policy that trains, the strategy that spreads it, and its job, for the tokenizer and the algorithm."""

    job: Any
    actor: Any
    world: Any
    strategy: Any
    tokenizer: Any


@dataclass(frozen=True)
class Work:
    """What an update computes: rows up to the weights of the loss, and what it minimises."""

    rows: Any
    objective: Any


def checks() -> list[Check]:
    """The checks of this file."""
    shape = "Qwen2.5-1.5B's shape, bfloat16"
    found = []
    for rank, seconds, algorithm, length in (
        (20, 30, "sft", "8k"),
        (21, 8, "sft", "short"),
        (24, 8, "grpo", "8k"),
        (75, 8, "sft", "2k"),
        (76, 25, "sft", "32k"),
        (77, 10, "grpo", "32k"),
    ):
        rows = f"{SHORT} short rows" if length == "short" else f"rows of {length} tokens"
        more = LONG if length == "32k" else ()
        run = partial(measure, algorithm, length, more=more)
        title = f"an update of {algorithm.upper()}, {rows}, {shape}"
        found.append(Check(f"{algorithm}:{length}", title, run, rank, seconds, cuda=rank > 70))
    for name, what, overrides, rank, seconds, package in (
        ("liger", "with Liger's kernels", ("actor.liger=true",), 60, 30, "liger_kernel"),
        ("fp8", "compiled and in float8", ("strategy.compile=true", "strategy.fp8=rowwise"), 63, 90, "torchao"),
    ):
        title, run = (
            f"an update of SFT {what}, rows of 8k tokens, {shape}",
            partial(measure, "sft", "8k", more=overrides),
        )
        found.append(Check(f"{name}:8k", title, run, rank, seconds, cuda=True, package=package))
    return [
        *found,
        Check("waits:8k", "how often an update waits for the device", waits, rank=22, seconds=6, cuda=True),
        Check("profile:8k", "the slowest operations of an update of SFT", profile_update, rank=23, seconds=8),
    ]


def measure(algorithm: str, length: str, setting: Setting, more: Sequence[str] = ()) -> Found:
    """Seconds of an update, with further options of the command line, and what follows from them."""
    import torch

    started = time.perf_counter()
    policy = shared_policy(setting, more)
    built = time.perf_counter() - started
    work = work_of(policy, algorithm, length, setting)
    if not setting.cpu:
        torch.cuda.reset_peak_memory_stats()
    first, took = timed(policy, work, setting), timed(policy, work, setting)
    return described(
        policy, work.rows, took, {"length": tokens_of(length, setting), "built_s": built, "first_s": first}
    )


def described(policy: Policy, rows: Any, seconds: float, numbers: dict[str, Any]) -> Found:
    """The figures of an update of so many seconds."""
    from rft.metrics import peak_gib

    tokens = int(rows["tokens", "attention_mask"].sum())
    numbers |= {"seconds": seconds, "tokens_per_s": tokens / seconds, "memory_gib": peak_gib(policy.world.device)}
    parts = [f"{numbers['tokens_per_s']:,.0f} tokens/s"]
    if (flops := policy.actor.flops(rows)) is not None:
        numbers["tflops"] = flops / seconds / 1e12
        parts.append(f"{numbers['tflops']:.3g} TFLOPS")
        if (peak := policy.strategy.peak_tflops()) is not None:
            numbers["mfu"] = numbers["tflops"] / peak
            parts.append(f"MFU {numbers['mfu']:.1%}")
    return Found(", ".join([*parts, f"peak {numbers['memory_gib']:.1f} GiB"]), numbers)


def waits(setting: Setting) -> Found:
    """Operations of an update that wait for the device, by the lines that call them."""
    import torch

    policy = shared_policy(setting)
    work = work_of(policy, "grpo", "8k", setting)
    timed(policy, work, setting)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            update(policy, work)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places: dict[str, int] = {}
    for one in caught:
        if "synchroniz" in str(one.message):
            place = f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}"
            places[place] = places.get(place, 0) + 1
    lines = [f"{count:4} {place}" for place, count in sorted(places.items(), key=lambda item: -item[1])]
    total = sum(places.values())
    if total > WAITS:
        raise FailedError(f"{total} waits in one update, more than {WAITS}: {', '.join(lines[:6])}")
    return Found(f"{total} waits", {"waits": total}, "\n".join(lines))


def profile_update(setting: Setting) -> Found:
    """The table of the slowest operations."""
    from torch.profiler import profile

    policy = shared_policy(setting)
    work = work_of(policy, "sft", "8k", setting)
    timed(policy, work, setting)
    with profile() as trace:
        update(policy, work)
    averages = trace.key_averages()
    clock = "self_cpu_time_total" if setting.cpu else "self_cuda_time_total"
    slowest = max(averages, key=lambda e: e.self_cpu_time_total if setting.cpu else e.self_device_time_total)
    table = averages.table(clock, SLOWEST, max_name_column_width=60)
    return Found(f"the slowest operation is {slowest.key[:80]}", {}, table)


def shared_policy(setting: Setting, more: Sequence[str] = ()) -> Policy:
    """The policy of a command line: that of the check before, if it is the same; otherwise that one is freed."""
    key = tuple(more)
    if setting.shared.get("policy", (None,))[0] != key:
        setting.shared.pop("policy", None)
        gc.collect()
        if not setting.cpu:
            import torch

            torch.cuda.empty_cache()
        setting.shared["policy"] = key, build_policy(setting, more)
    policy: Policy = setting.shared["policy"][1]
    return policy


def build_policy(setting: Setting, more: Sequence[str]) -> Policy:
    """A policy with random weights and an optimizer."""
    from gpu.jobs import compose_config
    from rft.actor.base import ModelContext
    from rft.setup.assembly import Job

    job = Job(compose_config([*options(setting), *more]))
    world = job.join()
    tokenizer, strategy = job.tokenizer.build(), job.strategy.build(world=world)
    with drawn_on_device():
        actor = job.actor.build(context=ModelContext("actor", world, strategy, tokenizer, 0))
    actor.begin_training(actor.optimizer_options, 1000)
    return Policy(job, actor, world, strategy, tokenizer)


def options(setting: Setting) -> list[str]:
    """The command line of the policy."""
    save_tokenizer(setting.folder / "tokenizer", 512 if setting.cpu else VOCABULARY)
    found = ["strategy=bf16", "actor/tokenizer=pretrained", f"actor.tokenizer.path={setting.folder / 'tokenizer'}"]
    found += [f"actor.model_config.{name}={value}" for name, value in (QWEN | (CPU if setting.cpu else {})).items()]
    found.append("~actor.model_config.head_dim")  # of the default model; a qwen2 has none
    return [*found, f"actor.micro_batch_tokens={LENGTHS['8k']}", "strategy.reshard_after_forward=false"]


def save_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer with `size` words as tokens, since the vocabulary of a new model is that of its tokenizer."""
    from bench.workload import save_tokenizer as save

    save(folder, size)


@contextmanager
def drawn_on_device() -> Iterator[None]:
    """Models get their numbers where they will compute: transformers draws on the CPU, in 70 ns a parameter."""
    import torch

    from rft.strategy.gather import to_local

    @torch.no_grad()
    def draw(model: Any, *_: Any) -> None:
        for name, parameter in model.named_parameters():
            local = to_local(parameter)
            if parameter.dim() > 1:
                local.normal_(0.0, 0.02)
            else:
                local.fill_(0.0 if name.endswith("bias") else 1.0)

    with mock.patch("rft.actor.model.read_weights", draw):
        yield


def tokens_of(length: str, setting: Setting) -> int:
    """Tokens of a row."""
    return max(LENGTHS[length] // (CPU_SCALE if setting.cpu else 1), 8)


def work_of(policy: Policy, algorithm: str, length: str, setting: Setting) -> Work:
    """The work of an update with rows of one length, made once."""
    from gpu.jobs import compose_config
    from rft.algorithm.objective import Update
    from rft.setup.assembly import Job

    made = setting.shared.setdefault("work", {})
    if (algorithm, length) not in made:
        method = Job(compose_config([*options(setting), *ALGORITHMS[algorithm]])).algorithm
        count = max(TOKENS // LENGTHS[length], 2 if algorithm == "grpo" else 1)  # a group has two rows at least
        rows = draw_batch(count, tokens_of(length, setting), len(policy.tokenizer), method, policy.world)
        made[algorithm, length] = Work(rows, Update(method.policy))
    found: Work = made[algorithm, length]
    return found


def update(policy: Policy, work: Work) -> None:
    """A step of the optimizer."""
    from rft.batch.collate import dummy_row
    from rft.metrics import Metrics

    policy.actor.update(work.rows.clone(), dummy_row(work.rows, work.rows), work.objective, 1.0, Metrics())


def timed(policy: Policy, work: Work, setting: Setting) -> float:
    """Seconds of an update."""
    started = time.perf_counter()
    update(policy, work)
    wait(setting)
    return time.perf_counter() - started


def draw_batch(rows: int, length: int, vocabulary: int, algorithm: Any, world: Any) -> Any:
    """Rows of drawn tokens, one group, up to the weights of the loss."""
    import torch

    from rft.batch.collate import collate
    from rft.metrics import Metrics

    draw = random.Random(0)
    prompt, made = min(PROMPT, length // 2), []
    for unit in range(rows):
        ids = torch.randint(2, vocabulary, (length,), generator=torch.Generator().manual_seed(unit))
        row = {"tokens": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "truncated": False}
        row |= {"response_mask": torch.arange(length) >= prompt, "group": 0, "unit": unit, "scores": draw.random()}
        made.append(row)
    batch = collate(made)
    algorithm.build_loss_mask(batch)
    algorithm.estimate_advantages(batch, world.all_sum, Metrics())
    algorithm.compute_loss_weights(batch, world.all_sum)
    return batch
