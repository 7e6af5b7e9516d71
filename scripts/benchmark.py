"""Measures the speed of `rft`, beside other libraries if they are installed, and its losses with stale samples.

python scripts/benchmark.py step            # a GRPO step by stage, and the same work through TRL (extra `bench`)
python scripts/benchmark.py step --equal    # the same with responses of equal length
python scripts/benchmark.py packing         # an update on rows packed, sorted, and as they come
python scripts/benchmark.py prefix          # an update that computes the prompt of a group once
python scripts/benchmark.py balance         # balance of the work of ranks, and the speed-up of two real ranks
python scripts/benchmark.py startup         # seconds from the command line to the first step, and TRL's
python scripts/benchmark.py logprob         # log-probabilities over a large vocabulary, and the plain way's and TRL's
python scripts/benchmark.py rollout         # tokens per second of hf and vLLM, and what new weights take
python scripts/benchmark.py asynchronous    # seconds of a step and accuracy with a vLLM server, by rollout.staleness
python scripts/benchmark.py dialogue        # turns per second of episodes, and what sleeping tools add
python scripts/benchmark.py reward          # calls per second of a reward in this process and in workers
python scripts/benchmark.py reward_models   # memory and seconds of three reward models, offloaded and not
python scripts/benchmark.py checkpoint      # seconds and memory of a sharded checkpoint, and of gathering on rank 0
python scripts/benchmark.py load            # seconds and memory of loading shards, and of loading whole first
python scripts/benchmark.py export          # seconds and memory of an export by file, and of a gathered one
python scripts/benchmark.py sync            # seconds and memory of new weights for hf, in bfloat16 and float32
python scripts/benchmark.py publish         # seconds and memory of new weights for servers, and of a gathered file
python scripts/benchmark.py data            # seconds and memory of a million short rows, and those of datasets
python scripts/benchmark.py staleness       # the final reward of every policy loss with samples of an old policy
"""

import argparse
from pathlib import Path

from bench import (
    asynchronous,
    balance,
    checkpoint,
    data,
    dialogue,
    logprob,
    model_io,
    packing,
    prefix,
    reward,
    reward_models,
    rollout,
    staleness,
    startup,
    step,
)
from bench.workload import SIZES
from rich.console import Console
from rich.text import Text


def main() -> None:
    """Runs the section that the command line names."""
    parser = argparse.ArgumentParser(description="Measures rft.")
    sections = parser.add_subparsers(dest="section", required=True, metavar="section")
    add_step(sections.add_parser("step", help="seconds per stage of a GRPO step, and against TRL's GRPOTrainer"))
    packing.add_options(sections.add_parser("packing", help="an update on rows packed, sorted, and as they come"))
    prefix.add_options(sections.add_parser("prefix", help="an update that computes the prompt of a group once"))
    balance.add_options(sections.add_parser("balance", help="work per rank for several ways to assign rows to ranks"))
    startup.add_options(sections.add_parser("startup", help="seconds until the first step is done, and TRL's"))
    logprob.add_options(sections.add_parser("logprob", help="log-probabilities, beside the plain way and TRL's"))
    rollout.add_options(sections.add_parser("rollout", help="sampled tokens per second and new weights, hf and vLLM"))
    asynchronous.add_options(
        sections.add_parser("asynchronous", help="seconds of a step and accuracy, by rollout.staleness")
    )
    dialogue.add_options(sections.add_parser("dialogue", help="turns per second of episodes, and of sleeping tools"))
    reward.add_options(sections.add_parser("reward", help="calls per second of a reward, and a plain pool's"))
    reward_models.add_options(
        sections.add_parser("reward_models", help="memory and seconds of reward models, offloaded and not")
    )
    checkpoint.add_options(
        sections.add_parser("checkpoint", help="seconds and memory of a checkpoint, and a gathered one's")
    )
    model_io.add_options(sections.add_parser("load", help="seconds and memory of loading, shards and whole"), "load")
    model_io.add_options(sections.add_parser("export", help="the same of an export, by file and whole"), "export")
    model_io.add_options(sections.add_parser("sync", help="the same of new weights for hf, bfloat16 and not"), "sync")
    model_io.add_options(sections.add_parser("publish", help="the same of new weights for servers"), "publish")
    data.add_options(sections.add_parser("data", help="seconds and memory of many short rows, and of datasets"))
    staleness.add_options(sections.add_parser("staleness", help="the final reward of every loss with old samples"))
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except (ValueError, RuntimeError) as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="bold red"))
        raise SystemExit(1) from None


def add_step(parser: argparse.ArgumentParser) -> None:
    """The options of `step`."""
    parser.add_argument("--rows", type=int, default=64, help="sampled rows a step, in groups of 8 (default: 64)")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest response (default: 256)")
    parser.add_argument("--equal", action="store_true", help="all responses have 64 tokens (or --longest, if less)")
    parser.add_argument("--size", choices=sorted(SIZES), default="21m", help="the model (default: 21m)")
    parser.add_argument("--repeats", type=int, default=2, help="measured steps after one to warm up (default: 2)")
    parser.add_argument("--trl-rows", type=int, default=8, help="rows of one forward of TRL's training (default: 8)")
    parser.add_argument("--rft-only", action="store_true", help="leaves TRL out")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/step.json"), help="where the numbers go")
    parser.set_defaults(run=step.run)


if __name__ == "__main__":
    main()
