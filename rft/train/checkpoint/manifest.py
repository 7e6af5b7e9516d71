"""`MANIFEST.json`: the hash of every file of a checkpoint. A checkpoint without a right manifest is not complete."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft.logger.disk import sync

MANIFEST = "MANIFEST.json"
TENSORS = ".safetensors"  # torch.distributed.checkpoint reads all such files of the folder


def files_of(folder: Path) -> list[str]:
    """The files of a checkpoint beside its manifest, relative to its folder, sorted."""
    found = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return sorted(path.relative_to(folder).as_posix() for path in found)


def describe(file: Path) -> dict[str, Any]:
    """Size and hash of a file."""
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def write_manifest(folder: Path, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Writes the manifest, and waits until it and all names of files are on the disk.

    Args:
        files: of the folder, with what `describe` found.
        facts: of the checkpoint.
    """
    content = {**facts, "files": dict(files)}
    content["sha256"] = digest(content)
    (folder / MANIFEST).write_bytes(_text(content).encode())
    sync(folder / MANIFEST)
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: it is missing or damaged.
    """
    try:
        text = (folder / MANIFEST).read_bytes().decode()
        content: dict[str, Any] = json.loads(text)
        own = content.pop("sha256")
        whole = own == digest(content) and text == _text({**content, "sha256": own})
    except FileNotFoundError as error:
        raise ValueError(f"{MANIFEST} is missing") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read") from error
    if not whole:
        raise ValueError(f"{MANIFEST} has changed since it was written")
    if missing := [key for key in ("step", "metric", "files") if key not in content]:
        raise ValueError(f"{MANIFEST} has no key {missing[0]!r}: another version wrote it")
    return content


def damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None.

    Args:
        part, parts: every `parts`-th file is hashed, from `part` on, so that ranks share the work.
    """
    try:
        files = read_manifest(folder)["files"]
    except ValueError as error:
        return str(error)
    found_files = set(files_of(folder))
    if missing := sorted(files.keys() - found_files):
        return f"{missing[0]} is missing"
    if added := sorted(name for name in found_files - files.keys() if "/" not in name and name.endswith(TENSORS)):
        return f"{added[0]} is not one of its files"
    for name in sorted(files)[part::parts]:
        try:
            found = describe(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != files[name]:
            return f"{name} has changed since it was written"
    return None


def _text(content: Any) -> str:
    return json.dumps(content, indent=1, sort_keys=True)


def digest(content: Any) -> str:
    """The hash of something that JSON can hold; the order of keys does not matter."""
    return hashlib.sha256(_text(content).encode()).hexdigest()
