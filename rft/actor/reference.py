"""A reference whose log-probabilities are computed before training and then read from a file."""

import gc
from collections.abc import Callable, Mapping
from hashlib import blake2b, sha256
from pathlib import Path
from pickle import UnpicklingError

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.base import ColumnModel, Columns, ModelContext, ModelOptions, TrainableModel
from rft.batch.columns import lengths
from rft.logger.disk import replacing


class PrecomputedReference(ColumnModel):
    """Computes with the reference model until its log-probabilities are saved, then returns the saved ones.

    Args:
        context: supplied by the run; rank zero writes and checks the file, and all ranks read it.
        load: loads the model. It is called only if there is no file; the model is freed when the file is written.
        copied: the model is the policy at the beginning of the stage.
        file: the file of the log-probabilities, on a disk that all ranks can read. An existing file is used if it has
            not changed since it was written.

    Attributes:
        problem: why there are no saved log-probabilities.
    """

    precomputed = True
    column = "ref_logprobs"

    def __init__(self, context: ModelContext, load: Callable[[], ColumnModel], copied: bool, file: Path) -> None:
        super().__init__(context, ModelOptions())
        self.load = load
        self.copied = copied
        self.file = file
        self._model: ColumnModel | None = None
        self._rows: dict[bytes, tuple[int, int]] | None = None  # first and last index of each row's numbers
        self.problem: str | None = self.world.decide(lambda: damage(file))
        if self.problem is None:
            self._read()

    @property
    def complete(self) -> bool:
        """Whether the file exists and is whole, so that the model is not needed."""
        return self._rows is not None

    def copy_weights_from(self, other: TrainableModel) -> None:
        """Does nothing: the log-probabilities are those of the policy when `write` is called."""
        assert self.copied

    def write(self, rows: Mapping[bytes, Tensor]) -> None:
        """Saves the log-probabilities of the trained tokens of each row, by its key of `row_keys`. A collective."""

        def save() -> None:
            keys = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), -1)
            ends = torch.tensor([len(numbers) for numbers in rows.values()]).cumsum(0)
            columns = {"keys": keys, "ends": ends, "logprobs": torch.cat(list(rows.values()))}
            with replacing(self.file) as partial:
                torch.save({**columns, "sha256": digest(columns)}, partial)

        self.world.decide(save)
        self._model = None
        gc.collect()  # the parts of a sharded model refer to each other
        self._read()

    def _read(self) -> None:
        saved = torch.load(self.file, mmap=True, weights_only=True)
        ends = saved["ends"].tolist()
        keys = (bytes(key) for key in saved["keys"].numpy())
        self._rows = dict(zip(keys, zip([0, *ends], ends, strict=False), strict=True))
        self._logprobs = saved["logprobs"]  # memory-mapped: read from the disk on access

    def compute_outputs(
        self, batch: TensorDict, outputs: tuple[str, ...], temperature: float, dummy: TensorDict | None
    ) -> Columns:
        """See `ColumnModel.compute`.

        Raises:
            ValueError: the file lacks a row.
        """
        if self._rows is None:
            self._model = self._model or self.load()
            return self._model.compute_outputs(batch, outputs, temperature, dummy)
        assert outputs == ("logprobs",)
        columns = torch.zeros(batch["loss_mask"].shape)
        for row, key in enumerate(row_keys(batch)):
            if key not in self._rows:
                raise ValueError(
                    f"{self.key}.precompute: a row of the step is not in {self.file}: data.train, its template or the "
                    "tokenizer has changed since the run began; start again with resume=never"
                )
            start, end = self._rows[key]
            columns[row, batch["loss_mask"][row]] = self._logprobs[start:end]
        return {"logprobs": columns}


def damage(file: Path) -> str | None:
    """Why a file of log-probabilities cannot be used, or None."""
    if not file.exists():
        return "is gone"
    try:
        saved = torch.load(file, mmap=True, weights_only=True)
        whole = saved.pop("sha256") == digest(saved)
    except (OSError, RuntimeError, UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError):
        return "cannot be read"  # a changed byte of its structure
    return None if whole else "has changed since it was written"


def digest(columns: Mapping[str, Tensor]) -> str:
    """A hash of tensors on the CPU, with their names, types and shapes."""
    hasher = sha256()
    for name, column in columns.items():
        hasher.update(f"{name} {column.dtype} {tuple(column.shape)} ".encode())
        hasher.update(column.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def row_keys(batch: TensorDict) -> list[bytes]:
    """The key of each row: a hash of its tokens and of the mask of trained tokens."""
    columns = [*batch["tokens"].values(), batch["loss_mask"]]
    return [
        blake2b(b"".join(column[row, :end].numpy().tobytes() for column in columns), digest_size=16).digest()
        for row, end in enumerate(lengths(batch).tolist())
    ]
