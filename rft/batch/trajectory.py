"""The record of one text, given or sampled, and the one function that makes a batch row of it.

The record stands below the packages that make text, because sources of given texts and sources that sample both use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from tensordict import TensorDict

from rft.batch.media import Media, concat_media


@dataclass(frozen=True)
class Segment:
    """A run of tokens with one origin: the engine sampled all of them, or none.

    Attributes:
        tokens: token ids.
        trains: whether the loss sees them.
        logprobs: log-probability of each token under the distribution that it was sampled from; None for given tokens.
        versions: the version of the weights that sampled each token; None for given tokens.
        media: what the processor returned for these tokens beside per-token columns, or None.
    """

    tokens: list[int]
    trains: bool
    logprobs: list[float] | None = None
    versions: list[int] | None = None
    media: Media | None = None

    def __post_init__(self) -> None:
        for numbers in (self.logprobs, self.versions):
            assert numbers is None or len(numbers) == len(self.tokens), "one number a token"
        assert (self.logprobs is None) == (self.versions is None), "a sampled token has a log-probability and a version"

    @property
    def sampled(self) -> bool:
        """Whether the engine sampled the tokens."""
        return self.logprobs is not None


@dataclass(frozen=True)
class Finish:
    """How a sampled text ended.

    Attributes:
        reason: `stop` at an end token or a stop string, `length` at the cap on new tokens.
        text: what rewards read: everything behind the prompt, without special tokens.
    """

    reason: Literal["stop", "length"]
    text: str


@dataclass(frozen=True)
class EpisodeInfo:
    """Names the trajectory that a row belongs to, where a trajectory was cut or branched into several rows.

    Attributes:
        trajectory: a number that no other trajectory of the step has.
    """

    trajectory: int


@dataclass(frozen=True)
class Trajectory:
    """One answer, one dialogue or one given text.

    Attributes:
        segments: in order; together they are the whole text, the prompt included.
        finish: how sampling ended; None where nothing was sampled.
        row: the row of the data set.
        episode: the trajectory's number, where it has several rows; None where it is one row.
    """

    segments: list[Segment]
    finish: Finish | None
    row: dict[str, Any]
    episode: EpisodeInfo | None = None

    @property
    def turns(self) -> int:
        """The number of sampled segments."""
        return sum(segment.sampled for segment in self.segments)


def given_segments(ids: Sequence[int], trains: Sequence[bool]) -> list[Segment]:
    """The segments of a given text.

    Args:
        ids: T token ids.
        trains: T flags that are True where the token trains.
    """
    runs = groupby(zip(ids, trains, strict=True), key=lambda pair: pair[1])
    return [Segment([token for token, _ in run], trains=flag) for flag, run in runs]


def to_row(trajectory: Trajectory, *, group: int, unit: int, turns: bool = False) -> dict[str, Any]:
    """The batch row of a trajectory, as `collate` takes it.

    All rows of a batch have the same columns. So a source whose trajectories may have several sampled segments says so
    with `turns`, and states the column `turn` among those that it writes.

    Args:
        trajectory: T tokens in all.
        group: rows of one prompt have one number.
        unit: rows that stay together have one number.
        turns: adds the column `turn`.

    Returns:
        `tokens` {`input_ids`, `attention_mask`} (T,) int64 each, `response_mask` (T,) bool, `group`, `unit`,
        `truncated`, `fields`. Where the engine sampled a segment also `rollout_logprobs` (T,) float32 and `version`
        (T,) int64, both 0 at given tokens. With `turns` also `turn` (T,) int64: 1 at the tokens of the first sampled
        segment, 2 at those of the second, 0 at given tokens. With an `episode` also `trajectory`. Where a segment has
        media also `media`: the mapping itself, so that rows share it, or the media of several segments concatenated.
    """
    segments, finish = trajectory.segments, trajectory.finish
    assert turns or trajectory.turns < 2, "a source of several sampled segments states turns=True"
    ids = torch.tensor([token for segment in segments for token in segment.tokens], dtype=torch.int64)  # (T,)
    row: dict[str, Any] = {
        "tokens": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "response_mask": torch.tensor([segment.trains for segment in segments for _ in segment.tokens]),  # (T,)
        "group": group,
        "unit": unit,
        "truncated": finish is not None and finish.reason == "length",
        "fields": trajectory.row,
    }
    if finish is not None:
        row["fields"] = trajectory.row | {"text": finish.text, "finish_reason": finish.reason}
    if trajectory.turns:
        logprobs = [number for segment in segments for number in segment.logprobs or [0.0] * len(segment.tokens)]
        versions = [number for segment in segments for number in segment.versions or [0] * len(segment.tokens)]
        row["rollout_logprobs"] = torch.tensor(logprobs, dtype=torch.float32)  # (T,)
        row["version"] = torch.tensor(versions, dtype=torch.int64)  # (T,)
    if turns:
        column, turn = [], 0
        for segment in segments:
            turn += segment.sampled
            column += [turn if segment.sampled else 0] * len(segment.tokens)
        row["turn"] = torch.tensor(column, dtype=torch.int64)  # (T,)
    if trajectory.episode is not None:
        row["trajectory"] = trajectory.episode.trajectory
    media = [segment.media for segment in segments if segment.media]
    if media:
        entries = [TensorDict(dict(part), batch_size=[]) for part in media]
        row["media"] = media[0] if len(media) == 1 else concat_media(entries)
    return row
