"""The model that a policy learns from: of each token's distribution it keeps the likeliest part."""

from collections.abc import Callable
from typing import Any, Literal

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rft.actor.actor import Actor
from rft.actor.init import read_config
from rft.distributed import World
from rft.strategy.fsdp2 import FSDP2


class Teacher(Actor):
    """A frozen actor that computes `top_ids` and `top_logprobs`, too.

    Args:
        top_k: tokens that are kept of a distribution, the likeliest ones; all of a smaller vocabulary.
        others: see `Actor`.

    Raises:
        ValueError: names the key where the model cannot be had.
    """

    def __init__(
        self,
        key: str,
        world: World,
        strategy: FSDP2,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        path: str | None,
        model_config: dict[str, Any] | None,
        head: Literal["lm"],
        micro_batch_tokens: int,
        packing: bool,
        share_prefix: bool,
        frozen: list[str],
        ema: None,
        lora: None,
        optimizer: None,
        top_k: int,
    ) -> None:
        run, model = (key, world, strategy, tokenizer, seed), (path, model_config, head)
        super().__init__(*run, *model, micro_batch_tokens, packing, share_prefix, frozen, ema, lora, optimizer)
        known = len(tokenizer) or self._plain.config.get_text_config().vocab_size  # a plan may do without a tokenizer
        self._asks = {"top": (min(top_k, known), known)}

    @staticmethod
    def check(options: dict[str, Any], tokenizer: PreTrainedTokenizerBase, temperature: float) -> None:
        """There is a teacher, and its tokens are those of the policy.

        Args:
            options: of the teacher.
            tokenizer: the policy's.
            temperature: at which it is to speak.

        Raises:
            ValueError: names the key.
        """
        path, tokens = options["path"], len(tokenizer)
        if options["top_k"] < 1:
            raise ValueError(f"teacher.top_k={options['top_k']}: set it to 1 or more")
        if path is None and options["model_config"] is None:
            raise ValueError("teacher.path is null, so there is nobody to learn from; set it to a folder or hub name")
        size = read_config(path, options["model_config"], tokens, "teacher").get_text_config().vocab_size
        if size < tokens:
            raise ValueError(
                f"teacher.path={path}: the model knows {size} tokens, but actor.tokenizer has {tokens}; choose a "
                "teacher with the vocabulary of the actor, or the other way round"
            )
        if path is None:
            return
        try:
            theirs = AutoTokenizer.from_pretrained(path).get_vocab()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"teacher.path={path}: it has no tokenizer to compare with actor.tokenizer ({error})"
            ) from error
        ours = tokenizer.get_vocab()
        if differing := sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token)):
            raise ValueError(
                f"teacher.path={path}: its tokenizer is another than actor.tokenizer: they differ in {len(differing)} "
                f"tokens, such as {differing[0]!r}; choose a teacher with the vocabulary of the actor, or the other "
                "way round"
            )

    @staticmethod
    def check_here(
        world: World, options: dict[str, Any], tokenizer: PreTrainedTokenizerBase, longest: Callable[[], int | None]
    ) -> None:
        """What can be said against it only where the run is to be. A collective, as `longest` is.

        Args:
            longest: counts the tokens of the longest row that can come; None where that is not known.
        """
