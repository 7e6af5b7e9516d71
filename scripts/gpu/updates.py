"""Updates of a model with the shape of Qwen2.5-1.5B and random weights: tokens per second, MFU, memory, a profile."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu.checks import Check, Found, Setting

TOKENS = 32768  # of an update
PROMPT = 64
REPEATS = 2  # measured updates, after one to warm up
SLOWEST = 30  # rows of the profile
LENGTHS = {"8k": 8192, "2k": 2048, "32k": 32768}
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
COMPILED = {  # float8 is faster than bfloat16 in compiled blocks alone, which fuse the casts
    "compile": ("strategy.compile=true",),
    "fp8": ("strategy.compile=true", "strategy.fp8=rowwise"),
}
CPU = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
CPU_SCALE = 64  # lengths are so much shorter on a CPU


@dataclass(frozen=True)
class Updates:
    """An actor with a batch.

    Attributes:
        update: takes a step of the optimizer and waits for the device; given a length, with rows of that length.
        tokens: of an update.
        flops: of an update, as `throughput/tflops` counts them; None if they are not counted.
        peak_tflops: of the device, None if it is not known.
        memory: peak since the model was built, in GiB.
    """

    update: Callable[..., None]
    tokens: int
    flops: float | None
    peak_tflops: float | None
    memory: Callable[[], float]


def checks() -> list[Check]:
    """The checks of this file."""
    found = []
    for rank, (length, tokens) in enumerate(LENGTHS.items()):
        for algorithm in ALGORITHMS:
            title = f"an update of {algorithm.upper()}, rows of {length} tokens, Qwen2.5-1.5B's shape, bfloat16"
            run = partial(measure, algorithm, tokens)
            first = rank == 0  # a CPU runs the first length alone
            found.append(Check(f"{algorithm}:{length}", title, run, 20 if first else 50 + rank, 240, cuda=not first))
    for rank, (name, more) in enumerate(COMPILED.items(), start=45):
        title = f"an update of SFT, rows of 8k tokens, Qwen2.5-1.5B's shape, bfloat16, {', '.join(more)}"
        run, package = partial(measure, "sft", LENGTHS["8k"], more=more), "torchao" if name == "fp8" else None
        found.append(Check(f"{name}:8k", title, run, rank, 300, cuda=True, package=package))
    title = "the slowest operations of an update of SFT, rows of 8k tokens"
    return [*found, Check("profile:8k", title, profile_update, rank=21, seconds=240)]


def measure(algorithm: str, length: int, setting: Setting, more: Sequence[str] = ()) -> Found:
    """Seconds of an update, with further options of the command line, and what follows from them."""
    updates = build(algorithm, length, setting, more)
    seconds = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        updates.update()
        seconds.append(time.perf_counter() - started)
    took = statistics.median(seconds[1:])
    numbers: dict[str, Any] = {"length": length, "seconds": took, "tokens_per_s": updates.tokens / took}
    numbers |= {"memory_gib": updates.memory(), "first_s": seconds[0]}
    parts = [f"{numbers['tokens_per_s']:,.0f} tokens/s"]
    if updates.flops is not None:
        numbers["tflops"] = updates.flops / took / 1e12
        parts.append(f"{numbers['tflops']:.3g} TFLOPS")
        if updates.peak_tflops is not None:
            numbers["mfu"] = numbers["tflops"] / updates.peak_tflops
            parts.append(f"MFU {numbers['mfu']:.1%}")
    return Found(", ".join([*parts, f"peak {numbers['memory_gib']:.1f} GiB"]), numbers)


def profile_update(setting: Setting) -> Found:
    """The table of the slowest operations; the trace is in `profile_8k.json.gz`."""
    from torch.profiler import profile

    updates = build("sft", LENGTHS["8k"], setting)
    updates.update()
    with profile() as trace:
        updates.update()
    trace.export_chrome_trace(str(setting.out / "profile_8k.json.gz"))
    averages = trace.key_averages()
    clock = "self_cpu_time_total" if setting.cpu else "self_cuda_time_total"
    slowest = max(averages, key=lambda e: e.self_cpu_time_total if setting.cpu else e.self_device_time_total)
    table = averages.table(clock, SLOWEST, max_name_column_width=60)
    return Found(f"the slowest operation is {slowest.key[:80]}; profile_8k.json.gz", {}, table)


def build(algorithm: str, length: int, setting: Setting, more: Sequence[str] = ()) -> Updates:
    """Builds the actor of a config, with random weights, and a batch of `TOKENS` tokens in rows of one length.

    Args:
        more: of the command line.
    """
    import torch

    from gpu.compose import compose_config
    from rft.actor.base import ModelContext
    from rft.algorithm.objective import Update
    from rft.batch.collate import dummy_row
    from rft.distributed import start
    from rft.metrics import Metrics, peak_gib
    from rft.setup.assembly import Job

    scale = CPU_SCALE if setting.cpu else 1
    job = Job(compose_config([*options(algorithm, length // scale, setting), *more]))
    world = start(job.run.strategy["device"])
    tokenizer = job.tokenizer.build()
    strategy = job.strategy.build(world=world)
    actor = job.actor.build(context=ModelContext("actor", world, strategy, tokenizer, 0))
    actor.begin_training(actor.optimizer_options, 100)
    rows = max(TOKENS // length, 2 if algorithm == "grpo" else 1)  # a group has two rows at least
    batch = draw_batch(rows, length // scale, len(tokenizer), job.algorithm, world)
    dummy, objective = dummy_row(batch, batch), Update(job.algorithm.policy)

    def update(other: int | None = None) -> None:
        drawn = batch if other is None else draw_batch(rows, other, len(tokenizer), job.algorithm, world)
        actor.update(drawn.clone(), dummy, objective, 1.0, Metrics())
        if world.device.type == "cuda":
            torch.cuda.synchronize()

    return Updates(
        update,
        rows * (length // scale),
        actor.flops(batch),
        strategy.peak_tflops(),
        lambda: peak_gib(world.device),
    )


def options(algorithm: str, length: int, setting: Setting) -> list[str]:
    """The command line: packed rows, recomputed activations only where a row has more than 8k tokens."""
    shape = QWEN | (CPU if setting.cpu else {})
    save_tokenizer(setting.folder / "tokenizer", 512 if setting.cpu else VOCABULARY)
    found = [*ALGORITHMS[algorithm], "strategy=bf16", "actor/tokenizer=pretrained"]
    found += [f"actor.tokenizer.path={setting.folder / 'tokenizer'}"]
    found += [f"actor.model_config.{name}={value}" for name, value in shape.items()]
    found.append("~actor.model_config.head_dim")  # of the default model; a qwen2 has none
    found += [f"actor.micro_batch_tokens={max(length, LENGTHS['8k'])}", "strategy.reshard_after_forward=false"]
    return [*found, f"strategy.activation_checkpointing={'full' if length > LENGTHS['8k'] else 'none'}"]


def save_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer with `size` words as tokens, since the vocabulary of a new model is that of its tokenizer."""
    from bench.workload import save_tokenizer as save

    save(folder, size)


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
