"""What a source of given texts will draw, before there is a run."""

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDict

from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.metrics import Metrics
from rft.registry import Target

SAMPLES = {"engine", "score", "logprobs"}  # what a source is supplied with that does more than read


class SingleProcess(World):
    """One process without a process group, for those who only want to know how many there are."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1


SINGLE_PROCESS = SingleProcess()


def only_reads(source: Target) -> bool:
    """Whether a source's batches are given texts alone."""
    return not SAMPLES & source.takes


def given(source: Target) -> Target | None:
    """A source of the given texts alone that are among what a source draws; None where all of it is sampled."""
    if only_reads(source):
        return source
    kind = source.factory.given(source.options)
    return None if kind is None else source.narrowed(kind)


def sample_always(source: Target) -> None:
    """Has a source that samples some of its batches sample all of them."""
    if source.options.get("sampled_share"):
        source.options["sampled_share"] = 1.0


def epoch(
    source: Target, world: World, encoder: Encoder, rows: Rows, prompts: int, **supplied: Any
) -> Iterator[TensorDict]:
    """This rank's batches of a source that only reads, until as many rows are drawn as there are.

    Args:
        rows: of the data set.
        prompts: rows of the data set in a batch.
        supplied: whatever else the source takes.

    Raises:
        ValueError: a row cannot be encoded.
    """
    drawing = source.build(world=world, encoder=encoder, rows=rows, prompts=prompts, **supplied)
    for _ in range(-(-len(rows) // prompts)):
        yield drawing.next(Metrics())


def check_examples(counts: list[int], context: int) -> None:
    """Raises a ValueError where a row is longer than the model's context.

    Args:
        counts: tokens of each row.
    """
    if max(counts) > context:
        raise ValueError(
            f"data.train: the longest row has {max(counts)} tokens, over the model's context of {context}; take out "
            "what is too long (mode=inspect counts it) or choose a model with a longer context"
        )
