"""Token ids with what the processor of a model returned beside them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rft.batch.media import Media, join_media

Columns = Mapping[str, Sequence[int]]
NO_COLUMNS: Columns = MappingProxyType({})


class RawText(NamedTuple):
    """A text as an engine with its own processor takes it.

    Attributes:
        ids: the token ids of the text before the processor expands its slots.
        media: by type, in the order of the slots, as `rft.data.encode.media.files` opens them.
        sampling_rate: of sounds among them, in samples per second; 0 without.
    """

    ids: list[int]
    media: Mapping[str, Sequence[Any]]
    sampling_rate: int = 0


class EncodedText(list[int]):
    """The token ids of a text: a list that also has columns and media.

    A slice is a plain list. A sum has the columns and the media of both texts; a plain list has none.

    Args:
        ids: the token ids.
        columns: of the model, one number for each token; tokens behind the end of a column have 0. Empty without a
            processor.
        media: what the processor returned for the media in the text, beside columns of tokens; None for a text without.
        raw: the text for an engine with its own processor; None for a text without media, and in runs whose engine
            has none.
    """

    def __init__(
        self,
        ids: Iterable[int],
        columns: Columns = NO_COLUMNS,
        media: Media | None = None,
        raw: RawText | None = None,
    ) -> None:
        super().__init__(ids)
        self.columns = dict(columns)
        self.media = media
        self.raw = raw

    def __add__(self, other: list[int]) -> "EncodedText":  # type: ignore[override]
        behind = as_encoded(other)
        columns = {name: self.column(name) + behind.column(name) for name in {**self.columns, **behind.columns}}
        media = [text.media for text in (self, behind) if text.media]
        return EncodedText([*self, *behind], columns, join_media(media), _join_raw(self, behind))

    def column(self, name: str) -> list[int]:
        """The numbers of all tokens in a column; 0 where it has none."""
        numbers = list(self.columns.get(name, ()))[: len(self)]
        return numbers + [0] * (len(self) - len(numbers))

    def part(self, start: int, end: int) -> "EncodedText":
        """The tokens from `start` to `end` with their columns. All media belong to the part that begins the text."""
        columns = {name: column[start:end] for name, column in self.columns.items()}
        return EncodedText(self[start:end], columns, None if start else self.media)

    def behind(self, count: int) -> "EncodedText":
        """The text behind its first `count` tokens, of which none is of a medium."""
        raw = None if self.raw is None else self.raw._replace(ids=self.raw.ids[count:])
        behind = self.part(count, len(self))
        return EncodedText(behind, behind.columns, self.media, raw)


def _join_raw(*texts: EncodedText) -> RawText | None:
    """The raw form of a sum; None if no part has one."""
    raws = [text.raw or RawText(text, {}) for text in texts]
    kinds = dict.fromkeys(kind for raw in raws for kind in raw.media)
    if not kinds:
        return None
    media = {kind: [medium for raw in raws for medium in raw.media.get(kind, ())] for kind in kinds}
    ids, rate = [token for raw in raws for token in raw.ids], max(raw.sampling_rate for raw in raws)
    return RawText(ids, media, rate)


def as_encoded(ids: Sequence[int]) -> EncodedText:
    """The ids, as a text without columns and media if they are a plain list."""
    return ids if isinstance(ids, EncodedText) else EncodedText(ids)


@dataclass(frozen=True)
class MediaFacts:
    """What models and engines know of the processor of a model that takes media.

    Attributes:
        refused: types of media that the run does not accept.
        placeholders: ids of the tokens that stand for embeddings of media or enclose them. They are never sampled.
        probe: a short text with one medium of each type, the same on every rank.
        stacked: names of tensors that the model takes with a dimension of 1 in front.
        save: writes the processor into the folder of an exported model.
    """

    refused: Sequence[str]
    placeholders: Sequence[int]
    probe: EncodedText
    stacked: frozenset[str]
    save: Callable[[Path], None]

    def all_kinds(self, names: Iterable[str]) -> bool:
        """Whether tensors of these names are of all types of media that the run accepts."""
        return (self.probe.media or {}).keys() <= {*names}
