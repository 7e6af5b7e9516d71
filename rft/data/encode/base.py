"""Texts with images, audio or video; and the abstract classes of chat templates, and of what turns such texts into
what a model reads.

A text has a slot for each of its media: the text that the model's chat template writes there.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rft.batch.encoded import EncodedText, MediaFacts

if TYPE_CHECKING:  # worker processes of reward rules start without transformers
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
TrainOn = Literal["response", "assistant", "last", "all"]
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


class Template(ABC):
    """Renders conversations.

    Attributes:
        modules: whose code decides the text, beside that of the class.
        name: of `data.template`, for messages.
        tokenizer: of the run.
        arguments: variables beside the messages.
        takes_tools: False if tools are ignored.
        takes_parts: whether a content may be a list of parts.
        added: texts of the tokens that the tokenizer finds before it splits the text between them, by id.
        special: those of them that are special, which texts of answers leave out.
        ends: the token that ends a plain answer, or the tokenizer's end token where none is written; and that of a turn
            that calls tools, where it is another one.
    """

    modules: ClassVar[tuple[ModuleType, ...]] = ()
    name: str
    tokenizer: "PreTrainedTokenizerBase"
    arguments: dict[str, Any]
    takes_tools: bool
    takes_parts: bool
    added: dict[int, str]
    special: dict[int, str]
    ends: tuple[int, ...]

    @property
    @abstractmethod
    def writes_calls(self) -> bool:
        """Whether the calls of tools in an answer are written."""

    @property
    @abstractmethod
    def cure(self) -> str:
        """How plain answers in messages train; empty where they do, and where no argument lets them."""

    @abstractmethod
    def prompt(self, messages: Messages, tools: list[dict[str, Any]] | None) -> str:
        """The text behind which an answer is sampled: a last message of the assistant is continued.

        Arguments and errors are those of `render`.
        """

    @abstractmethod
    def render(
        self, messages: Messages, tools: list[dict[str, Any]] | None, answering: bool, continued: bool = False
    ) -> str:
        """The text of a conversation. An answer that has the end token already is rendered without it.

        Args:
            tools: schemas of functions, or None.
            answering: adds the generation prompt.
            continued: ends the text with the content of the last message instead.

        Raises:
            ValueError: the template cannot render it.
        """

    @abstractmethod
    def schemas(self, tools: Any, what: str) -> list[dict[str, Any]]:
        """Tool schemas, from a list or its JSON.

        Args:
            what: what error messages call them.

        Raises:
            ValueError: they are of another form, or the template ignores tools.
        """

    @abstractmethod
    def length(self, turn: str) -> int:
        """Characters of an assistant's turn, up to the end of its end token.

        Args:
            turn: the text of the last turn of a conversation, after the prompt.

        Raises:
            ValueError: there is no such token.
        """

    @abstractmethod
    def check_calls(self, messages: Messages) -> None:
        """Raises ValueError where messages have calls of tools and the template leaves them out."""


class MediaProcessor(ABC):
    """Turns texts with media into what a model reads.

    Attributes:
        modules: whose code decides the tokens, beside that of the class.
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
