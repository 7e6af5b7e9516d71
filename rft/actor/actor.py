"""An actor: a transformers model that computes columns of the batch and maybe trains. Policy, reference and critic."""

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from rft.actor.base import ColumnModel, Columns, ModelContext, NonFiniteError, TrainableModel
from rft.actor.forward.backbone import media_part
from rft.actor.heads import ValueNetwork
from rft.actor.loading.export import exported
from rft.actor.loading.tensor_names import inner_prefix, outer_prefix
from rft.actor.lora.base import LoraWeights
from rft.actor.model import build_model, empty_like, write_export
from rft.actor.optim.optimizer import Optimizer
from rft.actor.options import PATTERNS, ActorOptions
from rft.actor.packing.micro_batches import MicroBatch, MicroBatcher, model_cost, model_flops, row_work
from rft.algorithm.divergence import log_policy_mismatch
from rft.algorithm.objective import Update
from rft.batch.balance import Cost
from rft.batch.columns import candidates, predicted
from rft.batch.device import HostColumns, one_ahead
from rft.imports import import_part
from rft.metrics import Metrics
from rft.strategy.base import TrainState
from rft.strategy.gather import RANK_ZERO, WHOLE, GatherOptions, to_local


class Actor(TrainableModel):
    """One model under a strategy.

    Args:
        context: supplied by the run.
        options: of the model; the run has checked them.

    Attributes:
        network: the sharded module.
        train_state: the optimizer of the current stage; None before `begin_training`.
        average: the `WeightAverage` of the updates of the stage, or None.
        loaded_dtype: see `ShardedModel`.

    Raises:
        ValueError: the model cannot be loaded or spread; names the key.
    """

    Options: ClassVar[type[ActorOptions]] = ActorOptions
    options: ActorOptions
    has_weights: ClassVar[bool] = True

    def __init__(self, context: ModelContext, options: ActorOptions) -> None:
        super().__init__(context, options)
        self.strategy = context.strategy
        self.balance_unit = "group" if options.share_prefix else "unit"
        self.optimizer_options = options.optimizer
        self.train_state: TrainState | None = None
        self.average: Any = None
        self._top = 0  # likeliest tokens that the network returns of each distribution
        model = build_model(context, options)
        self.network, self.adapters, self.loaded_dtype = model.network, model.adapters, model.loaded_dtype
        backbone = None if context.media is None else self.network.model.base_model
        cap, packing = options.micro_batch_tokens, options.packing
        self.micro_batcher = MicroBatcher(cap, packing, options.share_prefix, backbone)
        self._blocks, self._plain = model.blocks, model.plain
        self._as_loaded = True
        self._base_version = 0

    def plain_model(self) -> PreTrainedModel:
        return empty_like(self._plain, self.world.device)

    def own_tensors(self) -> Iterable[Tensor]:
        return self.network.state_dict().values()

    @torch.no_grad()
    def nonfinite_tensor(self) -> str | None:
        """See `TrainableModel.nonfinite_tensor`; each rank reads its own shards, without a copy of them."""
        packed = () if self.adapters is None else self.adapters.packed.values()
        no_numbers = {id(layer.weight) for layer in packed}  # bytes that are viewed as floating-point numbers
        local = {
            name: to_local(p)
            for name, p in self.network.named_parameters()
            if p.is_floating_point() and id(p) not in no_numbers
        }
        local = {name: tensor for name, tensor in local.items() if tensor.numel()}
        sums = torch.stack(
            [torch.stack(torch.aminmax(tensor)).float().sum() for tensor in local.values()]
        )  # infinity and nan stay
        first = next(itertools.compress(local, (~sums.isfinite()).tolist()), None)
        return next((name for name in self.world.gather(first) if name is not None), None)

    @cached_property
    def cost(self) -> Cost:
        """What a row costs this model."""
        return model_cost(self._plain, self.context.media)

    def work(self, batch: TensorDict) -> Tensor:
        return row_work(self.cost, batch, self.micro_batcher.shared(batch))

    def flops(self, batch: TensorDict) -> float | None:
        """See `TrainableModel.flops`; None where some weights do not train, whose gradients `cost` counts."""
        if self.adapters is not None or self.options.frozen:
            return None
        return model_flops(self.cost, batch, self.micro_batcher.shared(batch))

    def weights(self, options: GatherOptions = WHOLE) -> Iterable[tuple[str, Tensor]]:
        """See `ColumnModel.weights`. On one rank tensors that are not rounded are no copies. With adapters they are
        `LoraWeights`."""
        if self.adapters is not None:
            return LoraWeights(self.adapters, self.strategy.full_tensors, options, self._base_version)
        return self.strategy.full_tensors(self._tensors(), options)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.adapters is not None:
            return self.adapters.merged()
        return iter(self.network.model.state_dict().items())

    def frozen_copy(self, key: str) -> ColumnModel | None:
        """See `TrainableModel.frozen_copy`: kept adapters beside the weights of this model."""
        if self.adapters is None:
            return None
        reference = import_part("rft.actor.lora.reference", "AdapterReference", f"{self.key}.lora")
        made: ColumnModel = reference(self.context.of(key), self, self.adapters)
        return made

    @torch.no_grad()
    def copy_weights_from(self, other: TrainableModel) -> None:
        """Takes over the weights of another actor's model; a value head stays as it is.

        Raises:
            ValueError: the two models have different shapes.
        """
        assert isinstance(other, Actor)
        targets = self.network.model.state_dict() if self.adapters is None else dict(self.adapters.frozen())
        outside = inner_prefix(other.network.model) if isinstance(self.network, ValueNetwork) else ""
        for name, source in other._tensors():
            if name.startswith(outside):  # a value model takes over the backbone
                tensor = targets[name.removeprefix(outside)]
                if tensor.shape != source.shape:
                    raise ValueError(
                        f"{self.key}.path: the weights {name} differ in shape from those of {other.key}.path"
                    )
                tensor.copy_(source)
        if self.adapters is not None:
            self.adapters.reset()
        self._as_loaded = False
        self._base_version += 1

    def begin_training(self, optimizer: Optimizer, updates: int) -> None:
        max_norm = math.inf if optimizer.max_grad_norm is None else optimizer.max_grad_norm
        factors: dict[nn.Parameter, float] = {}
        if optimizer.lr_factors:
            lr_factors = import_part(PATTERNS, "lr_factors", f"{self.key}.optimizer.lr_factors")
            factors = lr_factors(self._named_parameters(), optimizer.lr_factors)
        self.train_state = self.strategy.begin_training(
            self.network, lambda: optimizer.build(self.network, self._blocks, updates, factors), max_norm
        )
        if (decay := self.options.ema) is not None:
            average = import_part("rft.actor.optim.ema", "WeightAverage", f"{self.key}.ema={decay}")
            self.average = average(self.network, decay)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters by their names in the whole model; a tied one by each of its names."""
        outside = outer_prefix(self._plain)
        for name, parameter in self.network.model.named_parameters(remove_duplicate=False):
            yield f"{outside}{name}", parameter

    @torch.no_grad()
    def compute_outputs(
        self, batch: TensorDict, outputs: tuple[str, ...], temperature: float, dummy: TensorDict | None
    ) -> Columns:
        """See `ColumnModel.compute`; the outputs are those of the network of its head."""
        columns = HostColumns(outputs, batch["loss_mask"].shape, self.world.device)
        for micro in self._micro_batches(batch, batch[:1] if dummy is None else dummy):
            for output, part in self._forward(micro, outputs, temperature).items():
                columns.write(output, micro.rows, part[: len(micro.rows)])
            del micro  # before another one is copied
        self.strategy.reshard(self.network)
        columns.wait()
        return columns.columns

    def update(
        self, batch: TensorDict, dummy: TensorDict, update: Update, temperature: float, metrics: Metrics
    ) -> None:
        total = torch.zeros((), device=self.world.device)
        with self.context.hooks.on_update(self):
            for micro in self._micro_batches(batch, dummy):
                total.add_(self._micro_step(micro, update, temperature, metrics))
                del micro  # before another one is copied
            for term in update.objective.terms:
                metrics.add(f"loss/{term.name}", 0.0, 1.0 / self.world.size)
            if not self._step(total, metrics):
                raise NonFiniteError(self.key, self._suspects(batch, dummy, update, temperature), batch)

    def _micro_step(self, micro: MicroBatch, update: Update, temperature: float, metrics: Metrics) -> Tensor:
        """Forward and backward of one micro-batch; returns its loss."""
        assert self.train_state is not None
        columns, rows = self._forward(micro, update.outputs, temperature), micro.batch
        if "logprobs" in columns and "old_logprobs" not in rows.keys():
            rows["old_logprobs"] = columns["logprobs"].detach()
        loss, shares, statistics = update.objective(columns, rows, micro.trajectories)
        with self.world.wait.during(f"the backward pass of {self.key}"):
            self.strategy.backward(self.network, self.train_state.scale.factor * loss, micro.last)
        statistics |= {name: columns[name] for name in update.watch}
        self._record(metrics, micro, shares, statistics)
        if update.log_mismatch:
            log_policy_mismatch(metrics, columns["logprobs"].detach(), rows)
        return loss.detach()

    def _step(self, loss: Tensor, metrics: Metrics) -> bool:
        """The optimizer step, skipped where a float16 gradient overflows; False where something is not finite."""
        state, prefix = self.train_state, "" if self.key == "actor" else f"{self.key}/"
        assert state is not None
        if state.scale.moves:
            metrics.add(f"{prefix}loss_scale", state.scale.factor)
        step = self.strategy.step(self.network, state, loss)
        if state.scale.moves:
            metrics.add(f"{prefix}skipped_updates", float(not step.finite))
        if not step.finite:
            return bool(torch.isfinite(step.loss)) and state.scale.retreat()
        metrics.add(f"{prefix}grad_norm", step.grad_norm)
        metrics.add(f"{prefix}lr", step.lr)
        if self.average is not None:
            self.average.update()
        return True

    def _record(
        self, metrics: Metrics, micro: MicroBatch, shares: dict[str, Tensor], statistics: dict[str, Tensor]
    ) -> None:
        """Adds the numbers of one micro-batch: shares of losses, and statistics per token (B, T) or per row (B,)."""
        keep, real = micro.batch["loss_mask"], micro.batch["tokens", "attention_mask"].sum()
        if len(micro.rows):  # the dummy row is not counted
            metrics.add("padding/waste", (micro.computed - real).clamp(min=0), micro.computed)
            if self.micro_batcher.share_prefix:
                metrics.add("prefix/shared", (real - micro.computed).clamp(min=0), real)
        for name, share in shares.items():
            metrics.add(name, share, 0.0)
        for name, values in statistics.items():
            metrics.mean(name, values, keep if values.dim() > 1 else keep.any(-1))

    def _micro_batches(self, batch: TensorDict, dummy: TensorDict) -> Iterator[MicroBatch]:
        made = self.micro_batcher.micro_batches(batch, dummy, self.world, self.strategy.context)
        return one_ahead(self.context.hooks.on_micro_batches(self, made), self.world.device)

    def _forward(self, micro: MicroBatch, outputs: tuple[str, ...], temperature: float) -> Columns:
        batch, media = micro.batch, None
        if (facts := self.context.media) is not None:
            with_probe = micro.media_differ and not facts.all_kinds(micro.media)  # others compute it, with all towers
            media = media_part("MediaInputs")(micro.media, facts, with_probe, micro.positions)
        rows = (micro.layout, media, micro.chosen, candidates(batch), self._top)
        with self.world.wait.during(f"the forward pass of {self.key}"):
            return self.network(batch["tokens"], predicted(batch), outputs, temperature, *rows)

    @torch.no_grad()
    def _suspects(
        self, batch: TensorDict, dummy: TensorDict, update: Update, temperature: float
    ) -> dict[str, list[int]]:
        """Columns that are not finite, and their rows: those of the batch, then those of the model.

        Of the other rows: the terms of the loss that are not finite. The column `scores` is left out: it is NaN in rows
        without a score, which do not train.
        """
        spoilt: dict[str, list[int]] = {}
        columns = {name: column for name, column in batch.items() if isinstance(column, Tensor) and name != "scores"}
        columns |= self.compute_outputs(batch if len(batch) else dummy, update.outputs, temperature, None)
        if not len(batch):
            return spoilt
        for name, column in columns.items():
            rows = (~torch.isfinite(column.flatten(1) if column.dim() > 1 else column[:, None])).any(1)
            if rows.any():
                spoilt[name] = rows.nonzero()[:, 0].tolist()
        if "logprobs" in columns and "old_logprobs" not in columns:
            batch = batch.clone(recurse=False).set("old_logprobs", columns["logprobs"])
        spoilt_rows = set(itertools.chain(*spoilt.values()))
        terms = update.objective.spoilt_rows(columns, batch)
        rest = {name: [row for row in rows if row not in spoilt_rows] for name, rows in terms.items()}
        return spoilt | {name: rows for name, rows in rest.items() if rows}

    def save_model(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """See `TrainableModel.save_model`.

        The folder of a value actor holds its backbone; the head is in the training state. With
        actor.lora.export=adapter the folder holds the adapter alone. An average of the weights goes to a second folder,
        named with `_ema` behind.
        """
        dtype = dtype or self.loaded_dtype
        self._write_model(folder, dtype)
        if self.average is not None:
            with self.average.in_network():
                self._write_model(folder.with_name(f"{folder.name}_ema"), dtype)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors that an export holds, one at a time, on rank 0 alone. A collective."""
        if self.adapters is not None and self.adapters.exported_alone:
            return self.strategy.full_tensors(self.adapters.tensors(), RANK_ZERO)
        names = exported(self._plain)
        kept = ((name, tensor) for name, tensor in self._tensors() if name in names)
        return self.strategy.full_tensors(kept, RANK_ZERO)

    def _write_model(self, folder: Path, dtype: torch.dtype) -> None:
        weights = self.export_weights()
        try:
            if self.world.rank == 0:
                media = self.context.media
                save_processor = None if media is None else media.save
                model, head, ends = self.plain_model(), self.options.head, self.context.ends
                write_export(weights, folder, model, self.adapters, self.tokenizer, head, save_processor, ends, dtype)
        finally:
            for _ in weights:  # the other ranks take part in these gathers, also if rank 0 cannot write
                pass

    def state_dict(self) -> dict[str, Any]:
        """Network, optimizer, schedule and average, sharded as they are and not copied.

        Frozen weights are left out where they are as they were loaded.
        """
        network = self.strategy.model_state(self.network, with_frozen=not self._as_loaded)
        state: dict[str, Any] = {"network": network, "as_loaded": self._as_loaded}
        if self.train_state is not None:
            state |= self.strategy.train_state(self.network, self.train_state)
        if self.average is not None:
            state["average"] = self.average.state_dict()
        return state

    def state_to_fill(self) -> dict[str, Any]:
        if self.train_state is not None:
            self.strategy.allocate_optimizer_state(self.train_state.optimizer)
        return self.state_dict() | {"network": self.strategy.model_state(self.network, with_frozen=True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.strategy.load_model_state(self.network, state["network"])
        self._as_loaded = state["as_loaded"]
        self._base_version += 1
        if "optimizer" in state:
            assert self.train_state is not None
            self.strategy.load_train_state(self.network, self.train_state, state)
            if self.average is not None:
                self.average.load_state_dict(state["average"])
