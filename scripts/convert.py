"""Makes a folder that `from_pretrained` and `actor.path` load out of an adapter or of a checkpoint of a trainer.

`to-gguf` makes one file for llama.cpp and what is built on it out of such a folder.

python scripts/convert.py from-checkpoint outputs/run/checkpoints/latest --out model
python scripts/convert.py merge outputs/run/checkpoints/latest/actor --out merged
python scripts/convert.py from-verl checkpoints/global_step_100/actor --out model
python scripts/convert.py from-deepspeed output/checkpoint-500 --config Qwen2.5-0.5B --out model
python scripts/convert.py to-gguf outputs/run/checkpoints/latest/actor --out model.gguf --type q8_0

No file can run code: pickled files are read with `weights_only=True`.
"""

import argparse
import sys
from pathlib import Path

from conversion.checkpoint import read_policy
from conversion.deepspeed import read_zero
from conversion.lora import merged
from conversion.model_folder import new_folder, write_model
from conversion.verl import CONFIG, read_shards

from rft.actor.lora.stored import read_options
from rft.strategy.base import DTYPES

# The types of llama.cpp that the package gguf writes.
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def main() -> None:
    """Runs the section that the command line names."""
    parser = argparse.ArgumentParser(description="Converts adapters and checkpoints to Hugging Face folders.")
    sections = parser.add_subparsers(dest="section", required=True, metavar="section")
    part = sections.add_parser("from-checkpoint", help="exports the policy of a checkpoint of this project")
    part.add_argument("folder", type=Path, help="checkpoints/step_<number> of a run")
    part.add_argument("--average", action="store_true", help="the average of the weights (actor.ema)")
    part.set_defaults(run=from_checkpoint)
    part = sections.add_parser("merge", help="merges a LoRA adapter into its base")
    part.add_argument("adapter", type=Path, help="the folder of the adapter, in peft's format")
    part.add_argument("--base", type=Path, default=None, help="the folder of its base (default: the one it names)")
    part.set_defaults(run=merge)
    part = sections.add_parser("from-verl", help="reads the FSDP shards of verl")
    part.add_argument("folder", type=Path, help="with the files model_world_size_<N>_rank_<r>.pt")
    part.add_argument("--config", type=Path, default=None, help="config and tokenizer (default: <folder>/huggingface)")
    part.set_defaults(run=from_verl)
    part = sections.add_parser("from-deepspeed", help="reads a checkpoint of DeepSpeed ZeRO 1, 2 or 3")
    part.add_argument("folder", type=Path, help="with the file `latest`, or that of one step")
    part.add_argument("--config", type=Path, required=True, help="the folder of the config and the tokenizer")
    part.set_defaults(run=from_deepspeed)
    for part in sections.choices.values():
        part.add_argument("--out", type=Path, required=True, help="the folder to make")
        part.add_argument(
            "--dtype", choices=DTYPES, default=None, help="of the weights (default: as the run exports, or as they are)"
        )
    part = sections.add_parser("to-gguf", help="writes a model folder as a file of llama.cpp")
    part.add_argument("folder", type=Path, help="of a model, such as the actor/ of a checkpoint")
    part.add_argument("--out", type=Path, required=True, help="the file to make")
    part.add_argument("--type", choices=GGUF_TYPES, default="q8_0", help="of the matrices (default: q8_0)")
    part.set_defaults(run=to_gguf)
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    sys.stdout.write(f"{arguments.out}\n")


def from_checkpoint(arguments: argparse.Namespace) -> None:
    """Exports the policy of a checkpoint of this project."""
    with new_folder(arguments.out) as partial:
        policy = read_policy(arguments.folder, arguments.average)
        policy.write(partial, policy.export_dtype if arguments.dtype is None else DTYPES[arguments.dtype])


def merge(arguments: argparse.Namespace) -> None:
    """Merges a LoRA adapter into its base."""
    base = arguments.base
    if base is None:
        named = read_options(arguments.adapter).get("base_model_name_or_path")
        if not named:
            raise ValueError(f"{arguments.adapter} names no base; name its folder with --base")
        base = Path(named)
    if not base.is_dir():
        raise ValueError(f"the base {base} is no folder; download it, and name its folder with --base")
    write_model(merged(arguments.adapter, base, arguments.dtype), base, arguments.out, arguments.dtype)


def from_verl(arguments: argparse.Namespace) -> None:
    """Reads the FSDP shards of verl."""
    config = arguments.config or arguments.folder / CONFIG
    write_model(read_shards(arguments.folder), config, arguments.out, arguments.dtype)


def from_deepspeed(arguments: argparse.Namespace) -> None:
    """Reads a checkpoint of DeepSpeed."""
    write_model(read_zero(arguments.folder), arguments.config, arguments.out, arguments.dtype)


def to_gguf(arguments: argparse.Namespace) -> None:
    """Writes a model folder as one GGUF file."""
    try:
        from conversion.gguf import write_gguf  # imports the package gguf, which the other sections do not need
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise ValueError("to-gguf needs the package gguf: pip install 'rft[gguf]'") from error
    for note in write_gguf(arguments.folder, arguments.out, arguments.type):
        sys.stderr.write(f"note: {note}\n")


if __name__ == "__main__":
    main()
