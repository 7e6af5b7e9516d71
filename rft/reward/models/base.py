"""The abstract classes of reward terms that are models of this process."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from rft.actor.forward.media import MediaInputs
from rft.actor.init import load_options, read_config
from rft.actor.scorers import CLASSIFIERS, check_classifier
from rft.batch.encoded import EncodedText
from rft.batch.media import concat_media
from rft.data.encode.encoder import Encoder
from rft.data.encode.media.processor import ModelProcessor
from rft.data.encode.parts import media_of
from rft.data.encode.processors import media_processor
from rft.distributed import World
from rft.errors import prefixed, without_code
from rft.ranges import PositiveInt
from rft.reward.models.offload import DeviceModel, HeldModel, ShardedModel, load_sharded
from rft.reward.term import Offload, Term
from rft.strategy.base import Strategy

DUMMY = EncodedText([0])  # the text of a forward in which other ranks have rows and this one has none


@dataclass(frozen=True)
class ModelTermOptions:
    """The options of a term that computes with a model.

    Attributes:
        path: a folder or hub name of a model and its tokenizer.
        template, template_arguments, system: how a prompt is rendered, as in `Encoder`.
        micro_batch_tokens: most tokens of one forward, padding included.
        dtype: of the weights and the computation.
        trust_remote_code: python files of the path may run, where the model or its tokenizer needs them.
    """

    path: str
    template: str
    template_arguments: dict[str, Any]
    system: str | None
    micro_batch_tokens: PositiveInt
    dtype: Literal["float32", "bfloat16", "float16"]
    trust_remote_code: bool


class ModelTerm(Term):
    """A term that computes with a model on the device of the run. Every rank holds the whole model, or a shard of it.

    A model that takes media reads those of the rows with the processor beside it.

    Args:
        key: supplied; the term's place in the yaml.
        options: an object of `Options`.
        tools: how a prompt is rendered, as in `Encoder`.

    Attributes:
        Options: the class of the options.
        options: as given.
        offloaded: the shards of the model are in host memory.
    """

    Options: ClassVar[type[ModelTermOptions]]
    reads: tuple[str, ...] = ("prompt",)
    has_model: ClassVar[bool] = True

    def __init__(self, key: str, options: ModelTermOptions, tools: str | None = None) -> None:
        self.options = options
        self._key = key
        self._tools = tools
        self._model: HeldModel = DeviceModel(self._load)
        self._downloaded = False
        self.offloaded = False

    def check(self) -> None:
        """Checks the config and the tokenizer of the path."""
        self._check_config()
        self._tokenized()

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks that the model takes the media of the row, see `Term.check_row`."""
        kinds = dict.fromkeys(kind for field in self.reads for kind, _ in media_of(row.get(field)))
        taken = () if not kinds or self._processor is None else tuple(self._processor.slots)
        if refused := [kind for kind in kinds if kind not in taken]:
            raise ValueError(
                f"{self._key}.path={self.options.path}: the row has {' and '.join(refused)}, and this model reads "
                f"{' and '.join(['text', *taken])} alone; name a model that reads it, or remove the row"
            )

    def place(self, device: torch.device, offload: Offload) -> None:
        self._model = DeviceModel(self._load)
        self._model.place(device, offload)

    def shard(self, world: World, make: Callable[[str], Strategy]) -> None:
        assert self.shards, f"{type(self).__name__} computes with a whole model"
        strategy = make(self.options.dtype)
        self.offloaded = strategy.offloads(trains=False)
        self._model = ShardedModel(partial(self._load_shards, strategy), world, strategy, self._key)
        self.collective = True

    def load(self) -> None:
        """Loads the model, which a run does when it scores first. A collective where it is sharded."""
        with self._model.loaded():
            pass

    def weights(self) -> Iterator[Tensor]:
        """The parameters of the model, as this rank holds them."""
        with self._model.loaded() as model:
            yield from model.parameters()

    @torch.no_grad()
    def compute_fullest(self, length: int) -> None:
        """Computes a forward of as many texts of a length as one has; for `mode=plan`."""
        self._compute([EncodedText(DUMMY * length)] * max(1, self.options.micro_batch_tokens // length))

    @property
    @abstractmethod
    def _auto_class(self) -> Any:
        """The class, or auto class of transformers, that loads the model."""

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
        how = {"config": self._config, "dtype": self.options.dtype, **load_options(self._config)}
        model = self._auto_class.from_pretrained(self.options.path, local_files_only=self._downloaded, **how)
        self._downloaded = True
        self._configure(model)
        return model.eval()

    def _load_shards(self, strategy: Strategy) -> PreTrainedModel:
        model = load_sharded(self.options.path, self._config, self._auto_class, strategy)
        self._configure(model)
        return model

    def _configure(self, model: PreTrainedModel) -> None:
        """Sets what a forward reads from the configs of a loaded model."""

    def _forward(self, model: PreTrainedModel, texts: list[EncodedText]) -> Tensor:
        """The outputs (N, ...) of N texts on the CPU: what `_outputs` calls."""
        raise NotImplementedError(f"{type(self).__name__} states shards=False and calls no `_outputs`")

    def _inputs(self, texts: Sequence[EncodedText], model: PreTrainedModel, left: bool = False) -> dict[str, Tensor]:
        """What a forward of N texts takes: ids, mask and columns (N, T), padded on one side, and the media."""
        width = max(map(len, texts))

        def pad(numbers: list[int], filler: int) -> list[int]:
            padding = [filler] * (width - len(numbers))
            return padding + numbers if left else numbers + padding

        names = dict.fromkeys(name for text in texts for name in text.columns)
        columns = {name: [pad(text.column(name), 0) for text in texts] for name in names}
        columns["input_ids"] = [pad(list(text), self._pad) for text in texts]
        columns["attention_mask"] = [pad([1] * len(text), 0) for text in texts]
        inputs = {name: torch.tensor(column, device=model.device) for name, column in columns.items()}
        if self._processor is not None:
            media = concat_media(TensorDict(dict(text.media or {}), batch_size=[]) for text in texts)
            inputs |= MediaInputs(media, self._processor.facts).all_tensors(model.dtype, model.device)
        return inputs

    def _outputs(self, encode: Callable[[], Sequence[EncodedText]]) -> list[Tensor]:
        """The output of each text; with a sharded model a collective, in which all ranks compute as many forwards.

        Args:
            encode: makes the texts. If it fails, this rank still computes with the others.
        """
        texts: Sequence[EncodedText] = ()
        try:
            texts = encode()
        finally:
            outputs = self._compute(texts)
        return outputs

    def _compute(self, texts: Sequence[EncodedText]) -> list[Tensor]:
        own = list(self._forwards([len(text) for text in texts]))
        found: dict[int, Tensor] = {}
        if count := self._model.forwards(len(own)):
            with self._model.loaded() as model:
                for chosen in [*own, *[[]] * (count - len(own))]:
                    with self._model.forward_pass():
                        outputs = self._forward(model, self._with_probe([texts[n] for n in chosen] or [DUMMY]))
                    found |= dict(zip(chosen, outputs[: len(chosen)], strict=True))
        return [found[n] for n in range(len(texts))]

    def _with_probe(self, texts: list[EncodedText]) -> list[EncodedText]:
        """The texts, and a small one with media behind them where they lack media that other ranks may have.

        FSDP gathers the weights of a tower only if every rank runs it.
        """
        if self._processor is None or not self.collective:
            return texts
        if self._processor.facts.all_kinds(name for text in texts for name in text.media or ()):
            return texts
        return [*texts, self._processor.probe]

    def _forwards(self, lengths: list[int]) -> Iterator[list[int]]:
        """Positions of the texts of each forward, the longest first."""
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        while order:
            count = max(1, self.options.micro_batch_tokens // lengths[order[0]])
            yield order[:count]
            order = order[count:]

    @cached_property
    def _config(self) -> PretrainedConfig:
        return read_config(self.options.path, None, 0, self._key, self.options.trust_remote_code)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        path, trusted = self.options.path, self.options.trust_remote_code
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
        except (OSError, ValueError) as error:
            reason = without_code(error, self._key, str(error))
            raise ValueError(f"{self._key}.path={path}: cannot load a tokenizer ({reason})") from error
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # as from a folder without a tokenizer
            raise ValueError(f"{self._key}.path={path}: there is no tokenizer beside the model; save it there")
        return tokenizer

    @cached_property
    def _processor(self) -> ModelProcessor | None:
        """The processor beside a model that takes media; None of a model of text."""
        if type(self._config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
            return None
        with prefixed(f"{self._key}.path="):
            return media_processor(self.options.path, self._tokenizer, self.options.trust_remote_code)

    @cached_property
    def _encoder(self) -> Encoder:
        options = self.options
        return Encoder(
            self._tokenizer,
            options.template,
            options.system,
            self._tools,
            arguments=options.template_arguments,
            processor=self._processor,
        )

    @cached_property
    def _pad(self) -> int:
        """The padding token: the model's, else the tokenizer's, else the end token."""
        tokens = [self._config.get_text_config().pad_token_id, self._tokenizer.pad_token_id]
        return next((token for token in tokens if token is not None), self._tokenizer.eos_token_id)


@dataclass(frozen=True)
class ClassifierOptions(ModelTermOptions):
    """The options of a classifier.

    Attributes:
        tools: how a prompt is rendered, as in `Encoder`.
    """

    tools: str | None


class ClassifierTerm(ModelTerm):
    """A term that scores by a classifier of transformers, as the algorithms of this project export it.

    Args:
        key, options: as in `ModelTerm`.

    Attributes:
        head: of the actor that was exported.
    """

    head: ClassVar[str]
    shards: ClassVar[bool] = True

    def __init__(self, key: str, options: ClassifierOptions) -> None:
        super().__init__(key, options, options.tools)

    @property
    def _auto_class(self) -> Any:
        return CLASSIFIERS[self.head].class_of(self._config)

    def _check_config(self) -> None:
        check_classifier(self._config, self.head, f"{self._key}.path={self.options.path}")

    def _configure(self, model: PreTrainedModel) -> None:
        model.config.get_text_config().pad_token_id = self._pad

    def _forward(self, model: PreTrainedModel, texts: list[EncodedText]) -> Tensor:
        """The logits of N texts: (N, labels), or (N, T, labels) of a model of tokens."""
        logits: Tensor = model(**self._inputs(texts, model)).logits
        return logits.float().cpu()
