"""The abstract classes of reward terms that are models of this process."""

from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rft.actor.init import CLASSIFIERS, attention, check_classifier, read_config
from rft.data.encode.encoder import Encoder
from rft.ranges import PositiveInt
from rft.reward.models.offload import DeviceModel
from rft.reward.term import Offload, Term


class ModelTerm(Term):
    """A term that computes with a model on the device of the run. Every rank holds the whole model.

    Args:
        key: supplied; the term's place in the yaml.
        path: a folder or hub name of a model and its tokenizer.
        template, template_arguments, system, tools: how a prompt is rendered, as in `Encoder`.
        micro_batch_tokens: most tokens of one forward, padding included.
        dtype: of the weights and the computation.
    """

    reads: tuple[str, ...] = ("prompt",)
    has_model: ClassVar[bool] = True

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
        self._model = DeviceModel(self._load)
        self._downloaded = False

    def check(self) -> None:
        """Checks the config and the tokenizer of the path."""
        self._check_config()
        self._tokenized()

    def place(self, device: torch.device, offload: Offload) -> None:
        """See `Term.place`."""
        self._model.place(device, offload)

    @property
    @abstractmethod
    def _auto_class(self) -> Any:
        """The auto class of transformers that loads the model."""

    @abstractmethod
    def _check_config(self) -> None:
        """Checks that the model is of the right kind.

        Raises:
            ValueError: it is not; names the key.
        """

    def _tokenized(self) -> object:
        """Builds what needs the tokenizer; raises a ValueError where that fails."""
        return self._encoder

    def _load(self) -> PreTrainedModel:
        """The model in host memory; loaded again, a model of the hub is read without network."""
        transformers_logging.disable_progress_bar()
        how = {"config": self._config, "dtype": self._dtype, **attention(self._config)}
        model = self._auto_class.from_pretrained(self._path, local_files_only=self._downloaded, **how)
        self._downloaded = True
        return model.eval()

    def _forwards(self, lengths: list[int]) -> Iterator[list[int]]:
        """Positions of the texts of each forward, the longest first."""
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        while order:
            count = max(1, self._cap // lengths[order[0]])
            yield order[:count]
            order = order[count:]

    @cached_property
    def _config(self) -> PretrainedConfig:
        return read_config(self._path, None, 0, self._key)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._key}.path={self._path}: cannot load a tokenizer ({error})") from error
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # as from a folder without a tokenizer
            raise ValueError(f"{self._key}.path={self._path}: there is no tokenizer beside the model; save it there")
        return tokenizer

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self._tokenizer, **self._rendering)

    @cached_property
    def _pad(self) -> int:
        """The padding token: the model's, else the tokenizer's, else the end token."""
        known = [self._config.get_text_config().pad_token_id, self._tokenizer.pad_token_id]
        return next((token for token in known if token is not None), self._tokenizer.eos_token_id)


class ClassifierTerm(ModelTerm):
    """A term that scores by a classifier of transformers, as the algorithms of this project export it.

    Args:
        key, path, template, template_arguments, system, tools, micro_batch_tokens, dtype: as in `ModelTerm`.

    Attributes:
        head: of the actor that was exported.
    """

    head: ClassVar[str]

    @property
    def _auto_class(self) -> Any:
        return CLASSIFIERS[self.head].kind

    def _check_config(self) -> None:
        check_classifier(self._config, self.head, f"{self._key}.path={self._path}")

    def _load(self) -> PreTrainedModel:
        model = super()._load()
        model.config.get_text_config().pad_token_id = self._pad
        return model

    def _logits(self, texts: list[Tensor]) -> list[Tensor]:
        """The logits of each text (T,): (labels,), or (T, labels) and more for a model of tokens."""
        found: dict[int, Tensor] = {}
        with self._model.loaded() as model:
            for chosen in self._forwards([len(text) for text in texts]):
                ids = pad_sequence([texts[n] for n in chosen], batch_first=True, padding_value=self._pad)
                mask = pad_sequence([torch.ones_like(texts[n]) for n in chosen], batch_first=True)
                logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits
                found |= dict(zip(chosen, logits.float().cpu(), strict=True))
        return [found[n] for n in range(len(texts))]
