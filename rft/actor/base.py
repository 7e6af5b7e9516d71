"""The protocol of the models of a run: a model computes columns of the batch, and a trainable one is updated, too.

The policy, the reference, the critic and every other model beside the policy implement one of these classes. A model of
your own is a class named by `_target_`; it takes `context` and `options`, an object of the frozen dataclass that it
names as its `Options`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rft.actor.optim.optimizer import Optimizer
from rft.actor.packing.micro_batches import MicroBatch
from rft.algorithm.objective import Update
from rft.batch.encoded import MediaFacts
from rft.distributed import World
from rft.metrics import Metrics
from rft.strategy.base import Strategy
from rft.strategy.gather import WHOLE, GatherOptions

Columns = dict[str, Tensor]  # (B, T) or (B, T, K) each
TRAINING_STATE = ("optimizer", "scheduler", "scale", "average")  # keys of the state of a model that a stage begins anew


class ModelHooks:
    """What a mode does at the calls of the models of a run; a subclass overrides what it observes or replaces."""

    def is_blank(self, model: "ColumnModel") -> bool:
        """Whether `ColumnModel.blank` replaces what the model computes."""
        return False

    def on_columns(self, model: "ColumnModel", columns: Columns) -> None:
        """After the model has computed columns."""

    def on_update(self, model: "ColumnModel") -> AbstractContextManager[None]:
        """Around `TrainableModel.update`."""
        return nullcontext()

    def on_retry(self, model: "ColumnModel") -> None:
        """Before `TrainableModel.update` is called again without some of the rows of a call that was not finite."""

    def on_micro_batches(self, model: "ColumnModel", micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches that a model computes, of those that it has made."""
        return micro_batches


@dataclass(frozen=True)
class ModelContext:
    """What the run supplies to each of its models.

    Attributes:
        key: the model's place in the yaml ("actor", "critic", "reference").
        world: all processes.
        strategy: spreads the model over them.
        tokenizer: of the policy.
        seed: of the run.
        hooks: run around the calls of the model.
        media: of the policy's processor; None for a model of text.
        ends: the tokens that answers are trained to end with, that of a plain answer first; empty: that of the
            tokenizer.
    """

    key: str
    world: World
    strategy: Strategy
    tokenizer: PreTrainedTokenizerBase
    seed: int
    hooks: ModelHooks = field(default_factory=ModelHooks)
    media: MediaFacts | None = None
    ends: tuple[int, ...] = ()

    def of(self, key: str) -> "ModelContext":
        """The same for the model with another key."""
        return replace(self, key=key)


@dataclass(frozen=True)
class ModelOptions:
    """The options of a model, and what a run checks of them before there is a model.

    A model without options needs no class of its own for them.
    """

    def errors(self, key: str) -> Iterator[str]:
        """A message for every mistake that the options of the model with this yaml key show by themselves."""
        yield from ()

    def check(self, key: str, tokenizer: PreTrainedTokenizerBase, temperature: float) -> None:
        """Checks the options of a model that the run reads columns of, before any model is loaded.

        Args:
            key: of the model in the yaml.
            tokenizer: of the policy.
            temperature: at which the model computes.

        Raises:
            ValueError: names the key and the cure.
        """

    def check_here(self, world: World, tokenizer: PreTrainedTokenizerBase, longest: Callable[[], int | None]) -> None:
        """Checks what can only be checked on the machines of the run. A collective, as `longest` is.

        Args:
            longest: counts the tokens of the longest row of the run; None where that is not known.

        Raises:
            ValueError: names the key and the cure.
        """


class ColumnModel(ABC):
    """A model that computes columns of the batch.

    Args:
        context: supplied by the run.
        options: an object of `Options`.

    Attributes:
        Options: the class of the options.
        has_weights: the model's weights are in this process, and its options are `ActorOptions`. Models that train, and
            those that start as a copy of the policy, have weights. A checkpoint holds the state of a frozen one only if
            its weights are no longer those that were loaded.
        remote: other processes compute the columns; `mode=plan` calls `blank` instead of `compute`.
        precomputed: `rft.train.precompute` computes its columns before training.
        optimizer_options: of a model that trains; None for a frozen one.
        tokenizer: of the policy.
    """

    Options: ClassVar[type[ModelOptions]] = ModelOptions
    has_weights: ClassVar[bool] = False
    remote: ClassVar[bool] = False
    precomputed: ClassVar[bool] = False
    optimizer_options: Optimizer | None = None

    def __init__(self, context: ModelContext, options: ModelOptions) -> None:
        self.options = options
        self.context = context
        self.key = context.key
        self.world = context.world
        self.tokenizer = context.tokenizer

    def compute(
        self, batch: TensorDict, outputs: tuple[str, ...], temperature: float, dummy: TensorDict | None = None
    ) -> Columns:
        """Columns of the batch, (B, T) or (B, T, K) each, without gradients. Every rank must take part.

        Args:
            batch: this rank's rows.
            outputs: names of the columns, as the role of the model or its head knows them.
            temperature: the divisor of the logits.
            dummy: a row for a rank that has fewer micro-batches than others; None where every rank has rows.
        """
        hooks = self.context.hooks
        if hooks.is_blank(self):
            return self.blank(batch, outputs)
        columns = self.compute_outputs(batch, outputs, temperature, dummy)
        hooks.on_columns(self, columns)
        return columns

    @abstractmethod
    def compute_outputs(
        self, batch: TensorDict, outputs: tuple[str, ...], temperature: float, dummy: TensorDict | None
    ) -> Columns:
        """What `compute` returns; implemented by each model, called by `compute` alone."""

    def blank(self, batch: TensorDict, outputs: tuple[str, ...]) -> Columns:
        """Columns of zeros in the shapes of `compute`."""
        return {output: torch.zeros(batch["loss_mask"].shape, device=batch["loss_mask"].device) for output in outputs}

    def own_tensors(self) -> Iterable[Tensor]:
        """The weights that this model holds in this process, sharded as they are."""
        return ()

    def copy_weights_from(self, other: "TrainableModel") -> None:
        """Becomes a copy of the policy, where the model's role follows it.

        Raises:
            ValueError: the two models have different shapes.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot become a copy of the policy")

    def weights(self, options: GatherOptions = WHOLE) -> Iterable[tuple[str, Tensor]]:
        """Names and whole tensors of the model, one at a time, for an engine that samples with it. A collective.

        Args:
            options: what the engine needs; see `Strategy.full_tensors`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights to sample with")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the model; see `rft.stateful.Stateful`. Tensors may be sharded. A collective."""
        return {}

    def state_to_fill(self) -> dict[str, Any]:
        """The state of this model, into whose tensors a checkpoint is loaded. A collective; the weights may change.

        Called before `begin_training` where the weights alone are loaded.
        """
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned, on any number of ranks. A collective.

        Args:
            state: its tensors are those of `state_to_fill`, filled in place; or others, where it had none. It has
                `TRAINING_STATE` only if the stage in which it was written is resumed.
        """


class TrainableModel(ColumnModel):
    """A model that can train; the policy is one.

    Attributes:
        balance_unit: rows that the balance over ranks keeps together: those of a `group` or of a `unit`.
    """

    balance_unit: Literal["group", "unit"] = "unit"

    @abstractmethod
    def begin_training(self, optimizer: Optimizer, updates: int) -> None:
        """Makes a new optimizer for a stage of a known number of updates."""

    @abstractmethod
    def update(
        self, batch: TensorDict, dummy: TensorDict, update: Update, temperature: float, metrics: Metrics
    ) -> None:
        """One optimizer step over this rank's rows of a mini-batch; none where a float16 gradient overflows.

        Args:
            batch: this rank's rows, with `loss_weights` that are right over all ranks.
            dummy: one row of weight zero, for a rank that has fewer micro-batches than others.
            update: what to minimise, and what to log beside it.
            temperature: the divisor of the logits.
            metrics: receives `loss/*`, the statistics, `grad_norm` and `lr`, under this model's key unless it is the
                policy.

        Raises:
            NonFiniteError: the loss or the gradient is not finite; the weights are as they were.
        """

    @abstractmethod
    def work(self, batch: TensorDict) -> Tensor:
        """Predicted work of each row, (B,) float64, for the balance over ranks."""

    def flops(self, batch: TensorDict) -> float | None:
        """Floating-point operations of a forward and a backward of these rows; None if they are not counted."""
        return None

    def nonfinite_tensor(self) -> str | None:
        """The name of the first weight that is not finite, or None. A collective."""
        return next((name for name, tensor in self.weights() if not bool(tensor.isfinite().all())), None)

    @abstractmethod
    def plain_model(self) -> PreTrainedModel:
        """The unsharded model without weights yet, for engines of this process and for export."""

    def frozen_copy(self, key: str) -> ColumnModel | None:
        """A frozen copy of the model as it is now that shares its weights, or None where there can be none.

        Args:
            key: of the copy.
        """
        return None

    @abstractmethod
    def save_model(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Writes the weights as a folder that `from_pretrained` loads, with the tokenizer. A collective.

        Args:
            dtype: of the weights in the files; None: that of the files that they were loaded from.
        """


def trainable(model: ColumnModel) -> TrainableModel:
    """The model as one that can train."""
    assert isinstance(model, TrainableModel), f"{model.key}: {type(model).__name__} cannot train"
    return model


class NonFiniteError(Exception):
    """A loss or gradient that is not finite.

    Attributes:
        actor: the key of the model.
        suspects: columns that are not finite, and their rows.
        batch: this rank's rows of the mini-batch.
    """

    def __init__(self, actor: str, suspects: dict[str, list[int]], batch: TensorDict) -> None:
        super().__init__(actor, suspects)
        self.actor = actor
        self.suspects = suspects
        self.batch = batch
