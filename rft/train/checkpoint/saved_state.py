"""The state of a checkpoint as a resumed run reads it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from rft.errors import describe
from rft.train.checkpoint.manifest import MANIFEST, digest, read_manifest
from rft.train.checkpoint.shards import load_tensors, reason_of
from rft.train.checkpoint.tree import join, kinds, places

STATE = "state.json"
STRUCTURE = "structure"  # key of the manifest: what `structure_of` makes of the state
KINDS = {"step": int, "stage": int, "stage_step": int, "stage_done": bool, "numbers": dict}  # of plain parts
# What a state raises that lacks a part, or has another one than the program reads.
CONTENT_ERRORS = (LookupError, TypeError, AttributeError, AssertionError, json.JSONDecodeError, UnicodeDecodeError,
                  CheckpointException, SafetensorError)  # fmt: skip


def structure_of(tree: Mapping[str, Any]) -> dict[str, str]:
    """A hash of every part of a state: of its keys, its lengths and the types of its values, not of the values.

    Args:
        tree: as `split` makes it.
    """
    return {key: digest(kinds(node)) for key, node in tree.items()}


class SavedState(Mapping[str, Any]):
    """The state of a checkpoint. To load tensors is a collective.

    Args:
        folder: of the checkpoint, with its manifest.

    Raises:
        ValueError: the state has other keys, or values of other types, than the run wrote; names the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = read_manifest(folder)
        self._ranks: int | None = facts.get("ranks")
        with self.reading():
            self._tree: dict[str, Any] = dict(json.loads((folder / STATE).read_text(encoding="utf-8")))
            found = structure_of(self._tree)
            written = facts.get(STRUCTURE, found)  # older versions wrote none
            if changed := [key for key in {**written, **found} if written.get(key) != found.get(key)]:
                raise TypeError(f"{', '.join(changed)}: a value has another type, or an entry is missing or new")

    def origin(self, ranks: int) -> str:
        """The folder, when the checkpoint was written, and by how many ranks if they are not as many as now."""
        written = datetime.fromtimestamp((self.folder / MANIFEST).stat().st_mtime)
        then = "" if self._ranks in (None, ranks) else f"; ranks: {self._ranks} then, {ranks} now"
        return f"{self.folder} (of {written:%Y-%m-%d %H:%M}{then})"

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The block reads the state or takes it over.

        Raises:
            ValueError: an error of the block says that a part of the state is missing or not as the program reads it;
                names the checkpoint.
        """
        try:
            yield
        except CONTENT_ERRORS as error:
            reason = reason_of(error) if isinstance(error, CheckpointException) else describe(error, __file__)
            raise ValueError(
                f"the checkpoint {self.folder} has another content than this program reads, although its hashes are "
                f"right: it was edited, or another version wrote it ({reason}). Continue with that "
                "version, or start from another checkpoint with resume=<path>, or from the beginning with resume=never"
            ) from error

    def __getitem__(self, key: str) -> Any:
        """A part of the state, its tensors whole and on the CPU."""
        with self.reading():
            value = self._load(self._tree[key])
            if type(value) is not KINDS.get(key, type(value)):
                raise TypeError(f"{key} is {value!r:.60}")
            return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def nodes(self, key: str) -> Any:
        """A part as `split` made it, with the names of its tensors."""
        with self.reading():
            return self._tree[key]

    def keys_of(self, key: str) -> list[str]:
        """The keys of a part that is a mapping."""
        with self.reading():
            return list(self._tree[key])

    def fill(self, key: str, name: str, template: Mapping[str, Any], left_out: tuple[str, ...] = ()) -> Any:
        """One entry of a part. Tensors are loaded in place into those of a template, where it has them.

        Args:
            template: a state with the same structure, its tensors spread over the ranks.
            left_out: keys of the entry that are not loaded.
        """
        with self.reading():
            node = {part: value for part, value in self._tree[key][name].items() if part not in left_out}
            return self._load(node, template)

    def _load(self, node: Any, template: Any = None) -> Any:
        with _decoding():
            tensors = dict(places(node, template))
        load_tensors(tensors, self.folder)
        with _decoding():
            return join(node, tensors)


@contextmanager
def _decoding() -> Iterator[None]:
    """A text that is no date and no number, or a number that its dtype cannot hold, is raised as a TypeError."""
    try:
        yield
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise TypeError(str(error)) from error
