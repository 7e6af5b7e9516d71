"""The options of rows: which train, which are held out, and how a row becomes a prompt."""

from dataclasses import dataclass
from typing import Annotated, Any

from transformers import PreTrainedTokenizerBase

from rft.batch.encoded import MediaFacts
from rft.conditions import GENERATION, GIVEN, ReadWith
from rft.data.encode.base import MediaProcessor, TrainOn
from rft.data.encode.encoder import Encoder
from rft.data.encode.truncation import Overlong, PromptLimit, TextLimit, Truncation
from rft.ranges import PositiveInt
from rft.sanitize import check_metric_name


@dataclass
class Data:
    """Rows to train on and held-out sets, and how a row becomes a prompt; see `rft.data.encode.encoder`.

    Attributes:
        name: goes into the name of the run.
        eval: held-out sets, by name.
    """

    name: str
    template: str
    template_arguments: dict[str, Any]
    system: str | None
    tools: str | None
    train_on: Annotated[TrainOn, ReadWith(GIVEN)]
    max_prompt_tokens: PositiveInt | None
    truncation: Truncation
    max_tokens: Annotated[PositiveInt | None, ReadWith(GIVEN)]
    overlong: Annotated[Overlong, ReadWith(GIVEN)]
    max_response_tokens: Annotated[PositiveInt, ReadWith(GENERATION)]
    streaming: PositiveInt | None
    shuffle: bool
    train: Any
    eval: dict[str, Any] | None
    path: str | None = None  # only the yaml of data=hub has this key, and its sets interpolate it

    def __post_init__(self) -> None:
        if self.max_prompt_tokens is None and self.truncation != "drop":
            raise ValueError(
                f"data.truncation={self.truncation} has no effect without a limit; set data.max_prompt_tokens, or "
                "data.truncation=drop"
            )
        for name in self.held_out():
            check_metric_name(name, f"data.eval.{name}")

    def unread(self, new_tokens: int) -> dict[str, str]:
        """The reason for every key below `data` that a run does not read.

        Args:
            new_tokens: `rollout.max_new_tokens`.
        """
        if new_tokens == self.max_response_tokens:
            return {}
        return {"data.max_response_tokens": f"rollout.max_new_tokens={new_tokens} takes its place"}

    def held_out(self) -> dict[str, Any]:
        """The nodes of the held-out sets, by name."""
        return {name: node for name, node in (self.eval or {}).items() if node is not None}

    def encoder(
        self, tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None, scored: bool = False
    ) -> Encoder:
        """The encoder, which turns rows into token ids."""
        texts = (self.template, self.system, self.tools, self.train_on, self.template_arguments)
        return Encoder(tokenizer, *texts, self.prompt_limit, processor, scored)

    @property
    def prompt_limit(self) -> PromptLimit | None:
        """What happens to long prompts; None if they have no limit."""
        return None if self.max_prompt_tokens is None else PromptLimit(self.max_prompt_tokens, self.truncation)

    def text_limit(self, context: int, media: MediaFacts | None) -> TextLimit:
        """What happens to long given texts.

        Args:
            context: the model's maximal number of tokens.
            media: what is known of the processor; None without one.

        Raises:
            ValueError: `max_tokens` is over the context.
        """
        if self.max_tokens is not None and self.max_tokens > context:
            raise ValueError(
                f"data.max_tokens={self.max_tokens} is over the model's context of {context}; lower it, or choose a "
                "model with a longer context"
            )
        name = f"the model's context of {context}" if self.max_tokens is None else f"data.max_tokens={self.max_tokens}"
        tokens = frozenset(() if media is None else media.placeholders)
        return TextLimit(self.max_tokens or context, self.overlong, name, tokens)

    def check_apart(self) -> None:
        """Raises a ValueError if a held-out set is the training set."""
        for name, node in self.held_out().items():
            if node == self.train:
                raise ValueError(
                    f"data.train is the same as data.eval.{name}, so nothing is held out; give one of them another path"
                )
