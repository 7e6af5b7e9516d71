"""The record of one text, given or sampled, and the one function that makes a batch row of it.

The record stands below the packages that make text, because sources of given texts and sources that sample both use it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, Literal

import torch

from rft.batch.encoded import as_encoded
from rft.batch.media import join_media
from rft.batch.row_fields import EPISODE_FIELD, PROMPT_OPENS
from rft.batch.turn_columns import turn_column


@dataclass(frozen=True)
class Segment:
    """A run of tokens with one origin: the engine sampled all of them, or none.

    Attributes:
        tokens: token ids; an `EncodedText` has the columns and the media of the segment.
        trains: whether the loss sees them.
        logprobs: log-probability of each token under the distribution that it was sampled from; None for given tokens.
        versions: the version of the weights that sampled each token; None for given tokens.
        continues: the segment belongs to the answer of the segment before it. A forced stop inserts a given segment
            into an answer, and the engine continues behind it: all three are one turn.
    """

    tokens: list[int]
    trains: bool
    logprobs: list[float] | None = None
    versions: list[int] | None = None
    continues: bool = False

    def __post_init__(self) -> None:
        for numbers in (self.logprobs, self.versions):
            assert numbers is None or len(numbers) == len(self.tokens), "one number a token"
        assert (self.logprobs is None) == (self.versions is None), "a sampled token has a log-probability and a version"

    @property
    def sampled(self) -> bool:
        """Whether the engine sampled the tokens."""
        return self.logprobs is not None

    @property
    def starts_turn(self) -> bool:
        """Whether an answer of the policy begins with the segment."""
        return self.sampled and not self.continues


@dataclass(frozen=True)
class Finish:
    """How a sampled text ended.

    Attributes:
        reason: `stop` at an end token or a stop string, `length` at the cap on new tokens.
        text: what rewards read, without special tokens: everything behind the prompt; of an episode the last answer.
        prompt_opens: the mark of the thought in which the prompt of this text ends, see `PromptThoughts`; None where
            it ends in none.
    """

    reason: Literal["stop", "length"]
    text: str
    prompt_opens: str | None = None


@dataclass(frozen=True)
class Trajectory:
    """One answer, one dialogue or one given text.

    Attributes:
        segments: in order; together they are the whole text, the prompt included.
        finish: how sampling ended; None where nothing was sampled.
        row: the row of the data set.
        earlier: the segments of the batch rows before that of `segments`, oldest first, of a dialogue that was cut or
            branched; each begins with its context. Empty where the trajectory is one row.
        episode: what an episode with an environment did, as JSON has it; None without one.
    """

    segments: list[Segment]
    finish: Finish | None
    row: dict[str, Any]
    earlier: tuple[list[Segment], ...] = ()
    episode: dict[str, Any] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """What rewards and logs read: the row of the data set, the entry `EPISODE_FIELD` where there is an episode, and
        `PROMPT_OPENS` where the prompt of the text ends in a thought."""
        found: dict[str, Any] = {} if self.episode is None else {EPISODE_FIELD: self.episode}
        if self.finish is not None and self.finish.prompt_opens is not None:
            found[PROMPT_OPENS] = self.finish.prompt_opens
        return self.row | found if found else self.row

    @property
    def text(self) -> str:
        """What rewards read of a sampled text."""
        assert self.finish is not None, "a given text has no finish"
        return self.finish.text

    @property
    def last_prompt(self) -> list[int]:
        """The tokens before the last answer of `segments`; none without an answer."""
        starts = [number for number, segment in enumerate(self.segments) if segment.starts_turn]
        return [token for segment in self.segments[: starts[-1] if starts else 0] for token in segment.tokens]

    @property
    def turns(self) -> int:
        """The number of answers."""
        return sum(segment.starts_turn for segment in self._all_segments())

    @property
    def forced_stops(self) -> int:
        """The number of answers that continue behind an inserted text."""
        return sum(segment.sampled and segment.continues for segment in self._all_segments())

    @property
    def sampled_tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(len(segment.tokens) for segment in self._all_segments() if segment.sampled)

    def _all_segments(self) -> Iterator[Segment]:
        return chain(*self.earlier, self.segments)


def given_segments(ids: Sequence[int], trains: Sequence[bool]) -> list[Segment]:
    """The segments of a given text. The first one has all media of an `EncodedText`.

    Args:
        ids: T token ids.
        trains: T flags that are True where the token trains.
    """
    assert len(ids) == len(trains), "one flag a token"
    text, segments, end = as_encoded(ids), [], 0
    for flag, run in groupby(trains):
        start, end = end, end + len(list(run))
        segments.append(Segment(text.part(start, end), trains=flag))
    return segments


def to_rows(trajectory: Trajectory, *, group: int, unit: int, columns: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The batch rows of a trajectory of a source that writes the columns `turn` and `trajectory`.

    Args:
        group: trajectories of one prompt have one number.
        unit: the number of the trajectory; its rows stay together.
        columns: those of `TURN_COLUMNS` that are added, of an episode.

    Returns:
        The rows as of `to_row`, oldest first, each with the column `trajectory`. Turns are numbered over all of them.
    """
    rows, first = [], 1
    for segments in (*trajectory.earlier, trajectory.segments):
        part = replace(trajectory, segments=segments, earlier=())
        row = to_row(part, group=group, unit=unit, turns=True, first_turn=first) | {"trajectory": unit}
        for name in columns:
            assert trajectory.episode is not None, "a dialogue without a record of its episode"
            row[name] = turn_column(name, row["turn"], trajectory.episode)
        rows.append(row)
        first += part.turns
    return rows


def to_row(
    trajectory: Trajectory, *, group: int, unit: int, turns: bool = False, first_turn: int = 1
) -> dict[str, Any]:
    """The batch row of a trajectory that is one row, as `collate` takes it.

    All rows of a batch have the same columns. So a source whose trajectories may have several turns says so with
    `turns`, and states the column `turn` among those that it writes.

    Args:
        trajectory: T tokens in all.
        group: rows of one prompt have one number.
        unit: rows that stay together have one number.
        turns: adds the column `turn`.
        first_turn: the number of the first turn.

    Returns:
        `tokens` {`input_ids`, `attention_mask`, and the columns of the segments} (T,) int64 each, `response_mask`
        (T,) bool, `group`, `unit`, `truncated`, `fields`. Where the engine sampled a segment also `rollout_logprobs`
        (T,) float32 and `version` (T,) int64, both 0 at given tokens. With `turns` also these two in any case, and
        `turn` (T,) int64: 1 at the tokens of the first answer, with what a forced stop inserts into it, 2 at those of
        the second, 0 at other given tokens.
        Where a segment has media also `media`: the mapping itself, so that rows share it, or the media of several
        segments concatenated; `fields` then has no objects that JSON cannot hold.
    """
    segments, finish = trajectory.segments, trajectory.finish
    assert not trajectory.earlier, "to_rows makes several rows"
    assert turns or trajectory.turns < 2, "a source of several turns states turns=True"
    ids = torch.tensor([token for segment in segments for token in segment.tokens], dtype=torch.int64)  # (T,)
    texts, tokens = [as_encoded(segment.tokens) for segment in segments], {}
    for name in dict.fromkeys(name for text in texts for name in text.columns):
        tokens[name] = torch.tensor([number for text in texts for number in text.column(name)])  # (T,)
    row: dict[str, Any] = {
        "tokens": {"input_ids": ids, "attention_mask": torch.ones_like(ids), **tokens},
        "response_mask": torch.tensor([segment.trains for segment in segments for _ in segment.tokens]),  # (T,)
        "group": group,
        "unit": unit,
        "truncated": finish is not None and finish.reason == "length",
        "fields": trajectory.fields,
    }
    if finish is not None:
        row["fields"] = trajectory.fields | {"text": finish.text, "finish_reason": finish.reason}
    if turns or trajectory.turns:
        logprobs = [number for segment in segments for number in segment.logprobs or [0.0] * len(segment.tokens)]
        versions = [number for segment in segments for number in segment.versions or [0] * len(segment.tokens)]
        row["rollout_logprobs"] = torch.tensor(logprobs, dtype=torch.float32)  # (T,)
        row["version"] = torch.tensor(versions, dtype=torch.int64)  # (T,)
    if turns:
        column, turn = [], first_turn - 1
        for segment in segments:
            turn += segment.starts_turn
            column += [turn if segment.sampled or segment.continues else 0] * len(segment.tokens)
        row["turn"] = torch.tensor(column, dtype=torch.int64)  # (T,)
    media = [text.media for text in texts if text.media]
    if media:
        row["media"] = join_media(media)
        row["fields"] = plain_fields(row["fields"])
    return row


def plain_fields(value: Any) -> Any:
    """A value of a row without objects that JSON cannot hold; the name of its class stands for each."""
    if isinstance(value, dict):
        return {name: plain_fields(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_fields(item) for item in value]
    known = value is None or isinstance(value, str | int | float)
    return value if known else f"<{type(value).__name__}>"
