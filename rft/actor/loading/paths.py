"""Paths of models that a run does not load as they are: GGUF files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rft.imports import import_part
from rft.logger.redact import ResolvedText
from rft.strategy.base import DTYPES

GGUF = ".gguf"  # the end of the name of a file
FLOAT32 = "float32"


def with_folders(config: Mapping[str, Any], tell: Callable[[str], object]) -> dict[str, Any]:
    """The config of a run with a folder in the place of each GGUF file that a key `path` names.

    The weights are dequantized to `strategy.dtype`. The folders are in the folder `cache` of the config, and are used
    again while the file has the same place, size and time of change, and the code that converts it is the same. Of
    several processes on a machine one converts, and the others wait for it.

    Args:
        config: resolved. `public_config` of what is returned still names the files.
        tell: gets a line before a file is converted, and one after it.

    Raises:
        ValueError: a file cannot be read; names the key.
    """
    dtype = config.get("strategy", {}).get("dtype")
    folders: dict[str, Path] = {}

    def replaced(node: Any, key: str) -> Any:
        if isinstance(node, Mapping):  # its own texts first: `actor.tokenizer.path` has the value of `actor.path`
            order = sorted(node, key=lambda name: isinstance(node[name], Mapping | list))
            values = {name: replaced(node[name], f"{key}.{name}".lstrip(".")) for name in order}
            return {name: values[name] for name in node}
        if isinstance(node, list):
            return [replaced(below, f"{key}[{number}]") for number, below in enumerate(node)]
        if not (isinstance(node, str) and key.endswith(".path") and node.lower().endswith(GGUF)):
            return node
        if node not in folders:
            folder_of = import_part("rft.actor.loading.gguf", "folder_of", f"{key}={node}")
            folders[node] = folder_of(node, dtype if dtype in DTYPES else FLOAT32, config.get("cache"), key, tell)
        return ResolvedText(str(folders[node]), node.source if isinstance(node, ResolvedText) else node)

    whole: dict[str, Any] = replaced(config, "")
    return whole
