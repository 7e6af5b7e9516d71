"""Reads and writes folders in the Hugging Face layout, a few tensors at a time."""

import json
import pickle
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from rft.setup.loadable import check_loadable

INDEX = "model.safetensors.index.json"
DTYPE_KEYS = {"dtype", "torch_dtype"}  # of a config; older versions of transformers write the second
BESIDE = ("*.json", "*.txt", "*.model", "*.jinja")  # of the files beside the weights; no code
FILE_BYTES = 2**32  # of a file of weights, or those of its only tensor


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all safetensors files of a folder, one after another.

    Raises:
        ValueError: there is no such file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no weights (*.safetensors)")
    for file in files:
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # it is no dict
                yield name, stored.get_tensor(name)


def read_pickled(file: Path, inert: Mapping[str, Any]) -> Any:
    """Reads a file of torch.save on the CPU without running code of it.

    Args:
        inert: classes in the place of those that the file names. All others must be known to `torch` as harmless.

    Raises:
        ValueError: the file is damaged, or names another class or function.
    """
    classes: list[Any] = [(replacement, name) for name, replacement in inert.items()]
    try:
        with torch.serialization.safe_globals(classes):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file} is damaged, or would run code: {str(error).splitlines()[0]}") from error


def write_model(tensors: Iterable[tuple[str, Tensor]], beside: Path, out: Path, dtype: str | None) -> None:
    """Writes a model. CPU memory: one file.

    Args:
        tensors: by name.
        beside: the folder whose config, tokenizer and chat template are copied.
        out: the folder to make.
        dtype: of floating-point tensors; None: as they are.

    Raises:
        ValueError: `out` exists, there is no config, or the tensors are not those of the config.
    """
    if not (beside / "config.json").is_file():
        raise ValueError(f"{beside} has no config.json; name the folder with the config and the tokenizer")
    with new_folder(out) as partial:
        for file in sorted(file for pattern in BESIDE for file in beside.glob(pattern)):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, partial / file.name)
        _name_dtype(partial / "config.json", _write_weights(_cast(tensors, dtype), partial))
        config = AutoConfig.from_pretrained(partial, trust_remote_code=False)
        head = "lm" if any(name.endswith("ForCausalLM") for name in config.architectures or ()) else "classifier"
        if head == "lm":
            check_loadable(config, str(partial), head, "model", reads_weights=True)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write in, which gets the name `out` after the block.

    Raises:
        ValueError: `out` exists.
    """
    partial = _partial(out, "a folder")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(out)


@contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """A file to write, which gets the name `out` after the block.

    Raises:
        ValueError: `out` exists.
    """
    partial = _partial(out, "a file")
    partial.parent.mkdir(parents=True, exist_ok=True)
    yield partial
    partial.rename(out)


def _partial(out: Path, kind: str) -> Path:
    """The name of what is not whole yet, beside `out`, which must not exist."""
    if out.exists():
        raise ValueError(f"{out} exists; name {kind} that does not")
    return out.with_name(f".{out.name}.partial")


def _cast(tensors: Iterable[tuple[str, Tensor]], dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    kind = None if dtype is None else getattr(torch, dtype)
    for name, tensor in tensors:
        yield name, tensor.to(kind) if kind is not None and tensor.is_floating_point() else tensor


def _name_dtype(config: Path, dtype: str) -> None:
    """Writes a dtype where a config and its parts name one, and at the top."""

    def named(node: dict[str, Any]) -> dict[str, Any]:
        parts = {key: named(value) if isinstance(value, dict) else value for key, value in node.items()}
        return {key: dtype if key in DTYPE_KEYS else value for key, value in parts.items()}

    whole = named(json.loads(config.read_text(encoding="utf-8")))
    if not DTYPE_KEYS & whole.keys():
        whole["dtype"] = dtype
    config.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> str:
    """Writes numbered files and their index, or one file without an index; returns the dtype of most numbers."""
    numbers = Counter[str]()
    files: list[list[str]] = []
    sizes: list[int] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(held, folder / f"{len(files)}.safetensors", {"format": "pt"})
        files.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and sum(other.nbytes for other in held.values()) + tensor.nbytes > FILE_BYTES:
            flush()
        held[name] = tensor.clone(memory_format=torch.contiguous_format)  # of its own storage, as safetensors needs
        sizes.append(tensor.nbytes)
        if tensor.is_floating_point():
            numbers[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    flush()
    common = max(numbers, key=numbers.__getitem__)
    if len(files) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return common
    placed: dict[str, str] = {}
    for number, names in enumerate(files):
        final = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / final)
        placed |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": placed}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return common
