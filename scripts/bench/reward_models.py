"""Section `reward_models`: memory and seconds of three reward models, which stay on the device or are offloaded."""

import argparse
import random
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.logprob_side import forget_peak, resident
from bench.options import check_positive
from bench.results import machine, show

SIZES = {  # about 96 MB in float32
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
DIGITS = "0123456789"
MODELS = 3
SIDES = ("device", "disk")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `reward_models`."""
    parser.add_argument("--responses", type=int, default=16, help="responses of a call (default: 16)")
    parser.add_argument("--length", type=int, default=32, help="tokens of each (default: 32)")
    parser.add_argument("--layers", type=int, default=8, help="layers of each model; 8 are 96 MB (default: 8)")
    parser.add_argument("--repeats", type=int, default=3, help="measured calls after one to warm up (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/reward_models.json"), help="for numbers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures both sides, each in a process of its own, prints a table, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: the sides do not compute the same scores.
    """
    names = ("responses", "length", "layers", "repeats")
    check_positive(arguments, *names)
    options = {name: vars(arguments)[name] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        sizes = apart(save_models, folder, arguments.layers)
        sides = {name: apart(measure, folder, name, options) for name in SIDES}
    if sides["device"].pop("scores") != sides["disk"].pop("scores"):
        raise RuntimeError("the scores of the two sides differ")
    numbers = {"machine": machine(), **options, "bytes": sizes, "sides": sides}
    numbers["ratio"] = {name: sides["disk"][name] / sides["device"][name] for name in ("peak", "seconds")}
    show(Console(), arguments.out, numbers, table(numbers))


def apart(function: Any, *arguments: Any) -> Any:
    """Calls a function in a process of its own, so that its memory can be measured."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def save_models(folder: str, layers: int) -> list[int]:
    """Saves models that know nothing, each with its tokenizer; returns the bytes of each."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import logging as transformers_logging

    from rft.data.encode.tokenizer import characters

    transformers_logging.disable_progress_bar()
    tokenizer, sizes = characters(alphabet=DIGITS), []
    shape = SIZES | {"num_hidden_layers": layers, "vocab_size": len(tokenizer), "num_labels": 1}
    for number in range(MODELS):
        torch.manual_seed(number)
        config = AutoConfig.for_model(**shape, pad_token_id=tokenizer.pad_token_id)
        model = AutoModelForSequenceClassification.from_config(config)
        model.save_pretrained(f"{folder}/{number}")
        tokenizer.save_pretrained(f"{folder}/{number}")
        sizes.append(sum(parameter.nbytes for parameter in model.parameters()))
    return sizes


def measure(folder: str, side: str, options: dict[str, int]) -> dict[str, Any]:
    """The peak of the resident memory over that before the first call, seconds of a call, and the scores."""
    import torch

    from bench.reward_yaml import build_reward

    node = {"_target_": "rft.reward.models.scalar.RewardModel", "weight": 1.0, "normalize": False, "dtype": "float32"}
    node |= {"template": "none", "template_arguments": {}, "system": None, "tools": None, "micro_batch_tokens": 256}
    node |= {"trust_remote_code": False}
    terms = {f"model_{number}": node | {"path": f"{folder}/{number}"} for number in range(MODELS)}
    reward = build_reward(terms, "model_0", offload="disk" if side == "disk" else None)
    reward.check()
    reward.place(torch.device("cpu"))
    draw = random.Random(0)
    texts = ["".join(draw.choices(DIGITS, k=options["length"])) for _ in range(options["responses"])]
    rows = [{"prompt": "1"}] * len(texts)
    before, seconds = forget_peak(), list[float]()
    for _ in range(1 + options["repeats"]):
        started = time.perf_counter()
        scores = reward.score(texts, rows).total.tolist()
        seconds.append(time.perf_counter() - started)
    return {
        "peak": resident("VmHWM") - before,
        "after": resident("VmRSS") - before,
        "seconds": statistics.median(seconds[1:]),
        "scores": scores,
    }


def table(numbers: dict[str, Any]) -> Table:
    """Memory and seconds of both sides."""
    sizes = ", ".join(f"{size / 2**20:.0f}" for size in numbers["bytes"])
    made = Table(title=f"{len(numbers['bytes'])} reward models of {sizes} MiB, {numbers['responses']} responses")
    for title in ("reward.offload", "peak (MiB)", "after a call (MiB)", "seconds of a call"):
        made.add_column(title, justify="right")
    for name, side in numbers["sides"].items():
        memory = (f"{side[which] / 2**20:.0f}" for which in ("peak", "after"))
        made.add_row("null" if name == "device" else name, *memory, f"{side['seconds']:.2f}")
    return made
