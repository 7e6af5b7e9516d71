"""The model that a policy learns from: of each token's distribution it keeps the most likely tokens."""

from dataclasses import dataclass
from typing import Annotated, Literal

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rft.actor.actor import Actor
from rft.actor.base import ModelContext
from rft.actor.forward.logits import vocabulary_size
from rft.actor.heads import LanguageNetwork
from rft.actor.init import read_config
from rft.actor.options import ActorOptions
from rft.conditions import ReadWith
from rft.errors import without_code
from rft.ranges import PositiveInt


@dataclass(frozen=True)
class TeacherOptions(ActorOptions):
    """What a `Teacher` reads.

    Args:
        top_k: the number of most likely tokens that are kept of a distribution; all where fewer can follow.
        others: see `ActorOptions`.
    """

    head: Literal["lm"]
    ema: None
    lora: None
    optimizer: None
    top_k: Annotated[PositiveInt, ReadWith("column teacher_top_ids")]

    def check(self, key: str, tokenizer: PreTrainedTokenizerBase, temperature: float) -> None:
        """Checks that there is a model and that it has the vocabulary of the policy."""
        path, tokens = self.path, vocabulary_size(tokenizer)
        if path is None and self.model_config is None:
            raise ValueError(f"{key}.path is null, so there is no model to learn from; set it to a folder or hub name")
        trusted = self.trust_remote_code
        size = read_config(path, self.model_config, tokens, key, trusted).get_text_config().vocab_size
        if size < tokens:
            raise ValueError(
                f"{key}.path={path}: the model knows {size} tokens, but actor.tokenizer has {tokens}; choose a "
                f"{key} with the vocabulary of the actor, or the other way round"
            )
        if path is None:
            return
        try:
            vocabulary = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted).get_vocab()
        except (OSError, ValueError) as error:
            reason = without_code(error, key, str(error))
            raise ValueError(
                f"{key}.path={path}: it has no tokenizer to compare with actor.tokenizer ({reason})"
            ) from error
        wanted = tokenizer.get_vocab()
        if differing := sorted(
            token for token in vocabulary.keys() | wanted.keys() if vocabulary.get(token) != wanted.get(token)
        ):
            raise ValueError(
                f"{key}.path={path}: its tokenizer is not actor.tokenizer: they differ in {len(differing)} tokens, "
                f"such as {differing[0]!r}; choose a {key} with the vocabulary of the actor, or the other way round"
            )


class Teacher(Actor):
    """A frozen actor that also computes `top_ids` and `top_logprobs`."""

    Options = TeacherOptions

    def __init__(self, context: ModelContext, options: TeacherOptions) -> None:
        super().__init__(context, options)
        assert isinstance(self.network, LanguageNetwork)
        following = len(self._plain.get_output_embeddings().weight) - len(self.network.forbidden)
        self._top = min(options.top_k, following)
