"""Reads GGUF files: transformers converts a file once, and the run loads the folder that this makes."""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic
from typing import Any

from rft.errors import listed
from rft.logger.disk import rename
from rft.strategy.base import DTYPES
from rft.waits import waiting

MAGIC = b"GGUF"  # the first bytes of a file
OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)  # the end of the name of one of several files


def folder_of(path: str, dtype: str, cache: str | None, key: str, tell: Callable[[str], object]) -> Path:
    """The folder that a GGUF file is converted into, with weights, config, tokenizer and chat template.

    Args:
        path: of the file, or `<user>/<repository>/<file>` on the hub.
        dtype: of the weights, one of `DTYPES`.
        cache: a folder, in which that of the model is made if it is not there.
        key: the yaml key of the path, for messages.
        tell: see `rft.actor.loading.paths`.

    Raises:
        ValueError: the file is not there, or transformers cannot read it.
    """
    if cache is None:
        raise ValueError(f"{key}={path}: cache=null, and a GGUF file is converted into this folder; set cache")
    if find_spec("gguf") is None:
        raise ValueError(f"{key}={path}: a GGUF file needs the package gguf: pip install 'rft[gguf]'")
    file = _local(path, key)
    _check(file, f"{key}={path}")
    folders = Path(cache).expanduser() / "gguf"
    folder = folders / f"{file.stem}-{dtype}-{_version(file)}"
    if folder.is_dir():
        return folder
    try:
        folders.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f".{folder.name}.lock"), f"{key}={path}"):
            if not folder.is_dir():  # else another process has made it meanwhile
                tell(f"{key}={path}: converting it to {dtype} for transformers, once")
                start = monotonic()
                note = _convert(file, dtype, folder, f"{key}={path}")
                tell(f"{key}={path}: converted in {monotonic() - start:.0f} s, into {folder}{note and '; '}{note}")
    except OSError as error:
        raise ValueError(f"{key}={path}: it cannot be converted into the folder cache={cache} ({error})") from error
    return folder


def _local(path: str, key: str) -> Path:
    file = Path(path).expanduser()
    if file.is_file():
        return file.resolve()
    repository, name = "/".join(Path(path).parts[:2]), "/".join(Path(path).parts[2:])
    reason = "no such file"
    if name and not file.is_absolute():
        from transformers.utils import cached_file

        try:
            return Path(cached_file(repository, name))
        except (OSError, ValueError) as error:
            reason = f"no such file, and none of the hub ({' '.join(str(error).split())})"
    raise ValueError(f"{key}={path}: {reason}; name a file, or <user>/<repository>/<file> of the hub")


def _check(file: Path, where: str) -> None:
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{where}: {file} is no GGUF file: it begins with other bytes; copy it there again")
    if OF_SEVERAL.search(file.name):
        raise ValueError(
            f"{where}: transformers reads a model from one file; merge the files with llama-gguf-split --merge"
        )


def _version(file: Path) -> str:
    """What changes with the file, and with the code that converts it."""
    import transformers

    state = file.stat()
    text = f"{file}\n{state.st_size}\n{state.st_mtime_ns}\n{transformers.__version__}"
    code = [path.read_bytes() for path in (Path(__file__), Path(__file__).with_name("gguf_facts.py"))]
    return hashlib.sha256(b"\n".join([text.encode(), *code])).hexdigest()[:12]


def _convert(file: Path, dtype: str, folder: Path, where: str) -> str:
    """Writes the folder whole, or not at all. Memory: all weights of the file.

    Returns:
        What the folder has otherwise than the file, or an empty text.
    """
    import transformers
    from gguf import GGUFReader

    from rft.actor.init import CONFIG_ERRORS, meta_model
    from rft.actor.loading.export import exported, write_model
    from rft.actor.loading.gguf_facts import set_rotation, set_split

    whole: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    packed = {}  # newer versions keep the blocks of the file where they have kernels for them
    if "GgufConfig" in dir(transformers):
        packed["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **whole)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, **whole, **packed, dtype=DTYPES[dtype], output_loading_info=True
        )
        reader = GGUFReader(file)
        note = set_split(tokenizer, reader)
        set_rotation(model.config, reader)
    except (*CONFIG_ERRORS, RuntimeError, ImportError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{where}: transformers cannot read this GGUF file ({reason}); name the folder of the original model"
        ) from error
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None  # else a model that is no longer quantized could not be exported
    vars(model).pop("_weight_conversions", None)
    weights = model.state_dict()
    sizes = {name: tensor.shape for name, tensor in meta_model(model.config).state_dict().items()}
    wrong = {
        *report["missing_keys"],
        *(name for name in sizes if name not in weights or weights[name].shape != sizes[name]),
    }
    if wrong:
        raise ValueError(
            f"{where}: transformers reads another model out of this GGUF file than its weights are of: it lacks "
            f"{listed(sorted(wrong))}, or has another shape of it; name the folder of the original model"
        )
    partial = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        partial.chmod(0o755)
        write_model(model, ((name, weights[name]) for name in exported(model)), partial, model.dtype)
        tokenizer.save_pretrained(partial)
        rename(partial, folder)
    except OSError:
        if not folder.is_dir():  # else another process has made it, on a file system without locks
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return note


@contextmanager
def _alone(lock: Path, where: str) -> Iterator[None]:
    """One process at a time is in the block, where the file system has locks; elsewhere the first one counts."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError), waiting(f"{where}: the run waits for another process, which converts it"):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
