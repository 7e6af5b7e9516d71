"""Texts with images, audio or video, and the abstract class of what turns them into what a model reads.

A text has a slot for each of its media: the text that the model's chat template writes there.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from rft.batch.encoded import EncodedText, MediaFacts
from rft.data.encode.templates import Messages

Parts = tuple[tuple[str, Any], ...]  # types and values of media


@dataclass(frozen=True)
class RichText:
    """A text with slots.

    Attributes:
        text: rendered, with a slot for each of the media.
        media: the type and value of each, in the order of the slots.
    """

    text: str
    media: Parts = ()


class MediaProcessor(ABC):
    """Turns texts with media into what a model reads.

    Attributes:
        modules: those that open media, beside that of the class: what they do decides the tokens of a text.
        keeps_raw: texts with media get `EncodedText.raw`; set for a run whose engine has its own processor.
        sends_padded: this engine leaves out the padding of media, as the model does.
    """

    modules: ClassVar[tuple[ModuleType, ...]] = ()
    keeps_raw = False
    sends_padded = True

    @property
    @abstractmethod
    def facts(self) -> MediaFacts:
        """What models and engines know of the processor."""

    @abstractmethod
    def escape(self, text: str) -> str:
        """A text of the user, in which placeholders are quoted: they are tokenized as plain characters."""

    @abstractmethod
    def take_media(self, messages: Messages, as_parts: bool) -> tuple[list[dict[str, Any]], Parts]:
        """Messages without the values of their media, and these; the texts in them are escaped.

        Args:
            as_parts: a content with media stays a list of parts; otherwise it becomes a text with slots.

        Raises:
            ValueError: the model does not take media of a type.
        """

    @abstractmethod
    def count(self, text: str) -> int:
        """The slots in a rendered text."""

    @abstractmethod
    def encode(self, rich: RichText) -> EncodedText:
        """The token ids of a text, without a BOS token, with the columns and the media that the model reads.

        Raises:
            ValueError: a medium cannot be opened, or the processor does not take it.
        """

    @abstractmethod
    def prefixes(self, rich: RichText, cuts: Sequence[int]) -> list[EncodedText]:
        """What `encode` returns for the text up to each cut. All media stand before the first cut, and are opened once.

        Args:
            cuts: ascending numbers of characters; the last is the length of the text.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the processor beside the tokenizer of an exported model."""


def refuse_media(messages: Messages) -> list[dict[str, Any]]:
    """The messages, for a model of text.

    Raises:
        ValueError: a message has media.
    """
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            kinds = ", ".join(dict.fromkeys(part["type"] for part in content if part["type"] != "text"))
            raise ValueError(
                f"message {number} has {kinds}, and the model of this run reads text alone; choose a model with a "
                "processor that reads it (a new one: actor=tiny_vision or actor=tiny_audio; of a folder: actor.path "
                "with actor/processor=pretrained), or remove the row"
            )
    return [dict(message) for message in messages]
