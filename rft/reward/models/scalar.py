"""The score of a reward model: a sequence classifier of transformers, as `algorithm=reward_model` exports it."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rft.actor.init import CLASSIFIERS, check_classifier, read_config
from rft.data.encode.encoder import Encoder
from rft.ranges import PositiveInt
from rft.reward.term import Term


class RewardModel(Term):
    """Scores a prompt with its response and the end token, encoded as in training. Every rank holds the whole model.

    Args:
        key: supplied; the term's place in the yaml.
        path: a folder or hub name of a sequence classifier with one label and its tokenizer.
        template, template_arguments, system, tools: how a prompt is rendered, as in `Encoder`.
        micro_batch_tokens: most tokens of one forward, padding included.
        dtype: of the weights and the computation.
    """

    reads: tuple[str, ...] = ("prompt",)
    head = "score"  # of the actor that was exported

    def __init__(
        self,
        key: str,
        path: str,
        template: str,
        template_arguments: dict[str, Any],
        system: str | None,
        tools: str | None,
        micro_batch_tokens: PositiveInt,
        dtype: Literal["float32", "bfloat16", "float16"],
    ) -> None:
        self._key = key
        self._path = path
        self._rendering: dict[str, Any] = {"template": template, "system": system, "tools": tools}
        self._rendering["arguments"] = template_arguments
        self._cap = micro_batch_tokens
        self._dtype = dtype
        self._device = torch.device("cpu")

    def check(self) -> None:
        """Checks the config and the tokenizer of the path."""
        check_classifier(read_config(self._path, None, 0, self._key), self.head, f"{self._key}.path={self._path}")
        self._tokenized()

    def _tokenized(self) -> object:
        """Builds what needs the tokenizer; raises a ValueError where that fails."""
        return self._encoder

    def place(self, device: torch.device) -> None:
        """See `Term.place`."""
        self._device = device

    @torch.no_grad()
    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """See `Term.values`."""
        texts = [
            torch.tensor(self._encoder.example({**row, "response": response})[0])
            for response, row in zip(responses, rows, strict=True)
        ]
        return [float(logits[0]) for logits in self._logits(texts)]

    def _logits(self, texts: list[Tensor]) -> list[Tensor]:
        """The logits of each text (T,): (labels,), or (T, labels) and more for a model of tokens."""
        found: dict[int, Tensor] = {}
        for chosen in self._forwards([len(text) for text in texts]):
            ids = pad_sequence([texts[n] for n in chosen], batch_first=True, padding_value=self._pad)
            mask = pad_sequence([torch.ones_like(texts[n]) for n in chosen], batch_first=True)
            logits = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits
            found |= dict(zip(chosen, logits.float().cpu(), strict=True))
        return [found[n] for n in range(len(texts))]

    def _forwards(self, lengths: list[int]) -> Iterator[list[int]]:
        """Positions of the texts of each forward, the longest first."""
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        while order:
            count = max(1, self._cap // lengths[order[0]])
            yield order[:count]
            order = order[count:]

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._key}.path={self._path}: cannot load a tokenizer ({error})") from error
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # as from a folder without a tokenizer
            raise ValueError(f"{self._key}.path={self._path}: there is no tokenizer beside the model; save it there")
        return tokenizer

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self._tokenizer, **self._rendering)

    @cached_property
    def _model(self) -> PreTrainedModel:
        transformers_logging.disable_progress_bar()
        model = CLASSIFIERS[self.head].kind.from_pretrained(self._path, dtype=self._dtype)
        model.config.get_text_config().pad_token_id = self._pad
        return model.to(self._device).eval()

    @cached_property
    def _pad(self) -> int:
        """The padding token: the model's, else the tokenizer's, else the end token."""
        own = read_config(self._path, None, 0, self._key).get_text_config().pad_token_id
        known = [id for id in (own, self._tokenizer.pad_token_id) if id is not None]
        return known[0] if known else self._tokenizer.eos_token_id
