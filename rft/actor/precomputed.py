"""A reference without weights: what it said of every row before the policy trained."""

import gc
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.actor import Actor
from rft.batch.columns import lengths
from rft.distributed import World


class PrecomputedReference(Actor):
    """Another actor, until its log-probabilities are written down; from then on these.

    Args:
        world: rank zero writes, and all ranks read.
        load: gives the actor, which is asked for where there is no file, and let go when there is.
        copied: the actor is the policy, and the reference what that is when the stage begins.
        file: of the log-probabilities, where all ranks can read. Where it is there already, it is taken up.
    """

    column = "ref_logprobs"
    key = "reference"

    def __init__(self, world: World, load: Callable[[], Actor], copied: bool, file: Path) -> None:
        self.world = world
        self.load = load
        self.copied = copied
        self.file = file
        self.optimizer_options = None
        self._actor: Actor | None = None
        self._rows: dict[bytes, tuple[int, int]] | None = None  # where the numbers of a row begin and end
        if file.exists():
            self._read()

    @property
    def complete(self) -> bool:
        """Whether it is done with the other actor."""
        return self._rows is not None

    def copy_weights_from(self, other: Actor) -> None:
        """It is the policy as it is when `write` is called."""
        assert self.copied

    def write(self, rows: Mapping[bytes, Tensor]) -> None:
        """Writes down the log-probabilities of the trained tokens of rows, by `row_keys`. A collective."""

        def save() -> None:
            keys = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), -1)
            ends = torch.tensor([len(numbers) for numbers in rows.values()]).cumsum(0)
            partial = self.file.with_suffix(".partial")
            torch.save({"keys": keys, "ends": ends, "logprobs": torch.cat(list(rows.values()))}, partial)
            partial.rename(self.file)

        self.world.decide(save)
        self._actor = None
        gc.collect()  # the parts of a sharded model know each other
        self._read()

    def _read(self) -> None:
        saved = torch.load(self.file, mmap=True, weights_only=True)
        ends = saved["ends"].tolist()
        keys = (bytes(key) for key in saved["keys"].numpy())
        self._rows = dict(zip(keys, zip([0, *ends], ends, strict=False), strict=True))
        self._logprobs = saved["logprobs"]  # on the disk until they are asked for

    def compute(
        self, batch: TensorDict, outputs: tuple[str, ...], temperature: float, dummy: TensorDict | None = None
    ) -> dict[str, Tensor]:
        """See `Actor.compute`.

        Raises:
            ValueError: a row is none of those that were written down.
        """
        if self._rows is None:
            self._actor = self._actor or self.load()
            return self._actor.compute(batch, outputs, temperature, dummy)
        assert outputs == ("logprobs",)
        columns = torch.zeros(batch["keep"].shape)
        for row, key in enumerate(row_keys(batch)):
            if key not in self._rows:
                raise ValueError(
                    f"reference.precompute: a row of the step is none of those in {self.file}: data.train, its "
                    "template or the tokenizer has changed since the run began; start again with resume=false"
                )
            start, end = self._rows[key]
            columns[row, batch["keep"][row]] = self._logprobs[start:end]
        return {"logprobs": columns}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: all there is to know is in the file."""
        return {}

    def load_state_dict(self, state: dict[str, Any], with_optimizer: bool) -> None:
        """Takes up what `state_dict` wrote."""


def row_keys(batch: TensorDict) -> list[bytes]:
    """What a row is known by: a hash of its tokens, and of which of them train."""
    columns = [*batch["tokens"].values(), batch["keep"]]
    return [
        blake2b(b"".join(column[row, :end].numpy().tobytes() for column in columns), digest_size=16).digest()
        for row, end in enumerate(lengths(batch).tolist())
    ]
