"""An actor: a model that computes columns of the batch and maybe trains. Policy, reference, critic: all this class."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rft.actor.frozen import freeze
from rft.actor.heads import LanguageNetwork, ScoreNetwork, StepNetwork, ValueNetwork, check_head, check_scorer
from rft.actor.init import CLASSIFIERS, blocks, load_model, load_scorer, read_config
from rft.actor.lora.adapters import Lora, LoraWeights
from rft.actor.optim.ema import WeightAverage
from rft.actor.optim.optimizer import Optimizer
from rft.actor.packing.attention import use_packed_attention
from rft.actor.packing.cost import model_cost, row_work
from rft.actor.packing.micro_batches import MicroBatch, MicroBatcher
from rft.actor.packing.sequence_shard import check_sequence_sharding
from rft.actor.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from rft.algorithm.mismatch import log_policy_mismatch
from rft.algorithm.objective import Objective
from rft.batch.balance import Cost
from rft.batch.columns import candidates
from rft.distributed import World
from rft.metrics import Metrics
from rft.strategy.fsdp2 import FSDP2
from rft.strategy.loss_scale import LossScale
from rft.strategy.tensor import TensorParallel


class Actor:
    """One model under a strategy.

    Args:
        key: the actor's place in the yaml ("actor", "critic", "reference"); supplied.
        world, strategy, tokenizer, seed: supplied by the run.
        path: a folder or hub name of a causal language model, or null.
        model_config: a transformers config with `model_type`, for a new model; null where a path is given.
        head: `lm` computes log-probabilities and entropy, `value` computes values, `score` one score a row, `step` one
            a token; what is exported then is a classifier of sequences or of tokens.
        micro_batch_tokens: cap on the tokens of one forward, padding included.
        packing: the rows of a forward lie behind one another; otherwise they are padded to the longest.
        share_prefix: rows of a group compute the tokens that they begin with once.
        frozen: patterns over the names of the model's state dict; the parameters that they match do not train.
        ema: null, or the decay of an average of the weights, which is exported beside them.
        lora: null, or the adapters that train in place of the model's own weights.
        optimizer: null for an actor that never trains.

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
        head: Literal["lm", "value", "score", "step"],
        micro_batch_tokens: int,
        packing: bool,
        share_prefix: bool,
        frozen: list[str],
        ema: float | None,
        lora: Lora | None,
        optimizer: Optimizer | None,
    ) -> None:
        self.key = key
        self.world = world
        self.strategy = strategy
        self.tokenizer = tokenizer
        self.micro_batcher = MicroBatcher(micro_batch_tokens, packing, share_prefix)
        self.optimizer_options = optimizer
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: torch.optim.lr_scheduler.LambdaLR | None = None
        self.scale = strategy.loss_scale()
        self.average: WeightAverage | None = None
        self._ema = ema
        self._asks: dict[str, Any] = {}  # what a forward is told beside its outputs
        shape = read_config(path, model_config, len(tokenizer), key)
        if strategy.context is not None:
            check_sequence_sharding(shape, packing, strategy.context, key)
        if isinstance(strategy.context, TensorParallel):
            check_tensor_parallel(shape, strategy.context, key)
        if lora is not None:
            lora.find(shape, key)
        model = (
            load_scorer(path, shape, seed, tokenizer.pad_token_id, head, key)
            if head in CLASSIFIERS
            else load_model(path, shape, seed)
        )
        self._blocks = blocks(model)
        self.network: LanguageNetwork | ValueNetwork | ScoreNetwork | StepNetwork
        if head == "lm":
            check_head(model, f"{key}.path")
            self.network = LanguageNetwork(model)
        elif head in CLASSIFIERS:
            check_scorer(model, f"{key}.path")
            self.network = ScoreNetwork(model) if head == "score" else StepNetwork(model)
        else:
            self.network = ValueNetwork(model.base_model)
        self._plain = empty_like(self.network.model, world.device)
        if packing:
            use_packed_attention(model, key)
        self.network.requires_grad_(optimizer is not None)
        freeze(model, frozen)
        self.adapters = (
            None if lora is None else lora.add(self.network.model, path, key, seed, strategy.dtype, world.device)
        )
        self._as_loaded = True
        self._base_version = 0
        if optimizer is None or lora is not None:
            for parameter in self.network.parameters():
                if not parameter.requires_grad:  # it is computed with in this dtype, and no update needs more
                    parameter.data = parameter.data.to(strategy.dtype)
        self.network.eval()  # no dropout: old and current log-probabilities are of one function
        if isinstance(strategy.context, TensorParallel):
            apply_tensor_parallel(self.network.model.base_model, strategy.context, key)
        strategy.shard(self.network, self._blocks)

    def plain_model(self) -> PreTrainedModel:
        """The unsharded model with no weights yet, for engines of this process and for export."""
        return empty_like(self._plain, self.world.device)

    @cached_property
    def cost(self) -> Cost:
        """What a row costs this model."""
        return model_cost(self._plain)

    def work(self, batch: TensorDict) -> Tensor:
        """Predicted work of each row, (B,) float64, for the balance over ranks."""
        return row_work(self.cost, batch, self.micro_batcher.shared(batch))

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Names and whole tensors of the model, one at a time. A collective. On one rank they are not copies.

        Those of a model with adapters are `LoraWeights`.
        """
        if self.adapters is not None:
            return LoraWeights(self.adapters, self.strategy.full_tensors, self._base_version)
        return self.strategy.full_tensors(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.adapters is not None:
            return self.adapters.merged()
        return iter(self.network.model.state_dict().items())

    @torch.no_grad()
    def copy_weights_from(self, other: "Actor") -> None:
        """Takes over the weights of another actor's model; a value head stays as it is.

        Raises:
            ValueError: the two are of different shape.
        """
        mine = self.network.model.state_dict() if self.adapters is None else dict(self.adapters.frozen())
        outside = f"{other.network.model.base_model_prefix}." if isinstance(self.network, ValueNetwork) else ""
        for name, source in other._tensors():
            if name.startswith(outside):  # a value model takes over the backbone
                tensor = mine[name.removeprefix(outside)]
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
        """Makes a new optimizer for a stage of a known number of updates."""
        self.max_grad_norm = optimizer.max_grad_norm
        self.scale = self.strategy.loss_scale()
        self.optimizer, self.scheduler = optimizer.build(self.network, self._blocks, updates)
        self.average = None if self._ema is None else WeightAverage(self.network, self.strategy, self._ema)

    @torch.no_grad()
    def compute(
        self, batch: TensorDict, outputs: tuple[str, ...], temperature: float, dummy: TensorDict | None = None
    ) -> dict[str, Tensor]:
        """Columns of the batch, (B, T) or (B, T, K) each, without gradients. Every rank must take part.

        Args:
            batch: this rank's rows.
            outputs: of those that the network of its head computes.
            temperature: what the logits are divided by.
            idle: a row for a rank that has fewer micro-batches than others; None where each has a row of its own.
        """
        zeros = torch.zeros(batch["keep"].shape, device=batch["keep"].device)
        columns = {output: zeros.clone() for output in outputs}
        for micro in self._micro_batches(batch, batch[:1] if dummy is None else dummy):
            for output, part in self._forward(micro, outputs, temperature).items():
                if part.dim() > columns[output].dim():  # several numbers a token
                    columns[output] = part.new_zeros(*zeros.shape, *part.shape[2:], device=zeros.device)
                columns[output][micro.rows, : part.shape[1]] = part[: len(micro.rows)].to(zeros.device)
        self.strategy.reshard(self.network)
        return columns

    def update(
        self,
        batch: TensorDict,
        dummy: TensorDict,
        objective: Objective,
        temperature: float,
        metrics: Metrics,
        watch: tuple[str, ...] = (),
        compare: bool = False,
    ) -> None:
        """One optimizer step over this rank's rows of a mini-batch; none where a float16 gradient overflows.

        Args:
            batch: this rank's rows, with `loss_weights` that are right over all ranks.
            idle: one row of weight zero, for a rank that has fewer micro-batches than others.
            objective: what to minimise.
            temperature: what the logits are divided by.
            metrics: receives `loss/*`, the statistics, `grad_norm` and `lr`, under this actor's name unless it is the
                policy.
            watch: outputs whose mean over trained tokens is logged although no loss reads them.
            compare: logs how far the current policy is from the one that sampled.

        Raises:
            Diverged: the loss or the gradient is not finite; the weights are as they were.
        """
        prefix = "" if self.key == "actor" else f"{self.key}/"
        outputs = tuple(dict.fromkeys((*objective.outputs, *watch, *(("logprobs",) if compare else ()))))
        total = torch.zeros((), device=self.world.device)
        for micro in self._micro_batches(batch, dummy):
            columns, rows = self._forward(micro, outputs, temperature), micro.batch
            if "logprobs" in columns and "old_logprobs" not in rows.keys():
                rows["old_logprobs"] = columns["logprobs"].detach()
            loss, shares, statistics = objective(columns, rows)
            self.strategy.backward(self.network, self.scale.factor * loss, micro.last)
            total += loss.detach()
            statistics |= {name: columns[name] for name in watch}
            self._record(metrics, micro, shares, statistics)
            if compare:
                log_policy_mismatch(metrics, columns["logprobs"].detach(), rows)
        for term in objective.terms:
            metrics.add(f"loss/{term.name}", 0.0, 1.0 / self.world.size)
        assert self.optimizer is not None and self.scheduler is not None
        if self.scale.moves:
            metrics.add(f"{prefix}loss_scale", self.scale.factor)
        self.scale.unscale(self.network.parameters())
        norm = self.strategy.clip_grad_norm(self.network.parameters(), self.max_grad_norm)
        total = self.world.all_sum(total)
        if not torch.isfinite(norm + total):  # a clamp may hide a NaN loss from the gradient
            self.optimizer.zero_grad()
            if torch.isfinite(total) and self.scale.retreat():
                return
            raise NonFiniteError(self.key, self._suspects(batch, dummy, objective, outputs, temperature), batch)
        metrics.add(f"{prefix}grad_norm", norm)
        metrics.add(f"{prefix}lr", self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        self.scheduler.step()
        self.scale.advance()
        self.optimizer.zero_grad()

    def _record(
        self, metrics: Metrics, micro: MicroBatch, shares: dict[str, Tensor], statistics: dict[str, Tensor]
    ) -> None:
        """Adds the numbers of one micro-batch: shares of losses, and statistics per token (B, T) or per row (B,)."""
        keep, real = micro.batch["keep"], micro.batch["tokens", "attention_mask"].sum()
        if len(micro.rows):  # an idle token is none of the step's
            metrics.add("padding/waste", (micro.computed - real).clamp(min=0), micro.computed)
            if self.micro_batcher.share_prefix:
                metrics.add("prefix/shared", (real - micro.computed).clamp(min=0), real)
        for name, share in shares.items():
            metrics.add(name, share, 0.0)
        for name, values in statistics.items():
            metrics.mean(name, values, keep if values.dim() > 1 else keep.any(-1))

    def _micro_batches(self, batch: TensorDict, dummy: TensorDict) -> Iterator[MicroBatch]:
        return self.micro_batcher.micro_batches(batch, dummy, self.world, self.strategy.context)

    def _forward(self, micro: MicroBatch, outputs: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        batch, network = micro.batch, self.network
        asked = {"candidates": candidates(batch)} if isinstance(network, LanguageNetwork) else {}
        return network(batch["tokens"], batch["keep"], outputs, temperature, micro.layout, **asked, **self._asks)

    @torch.no_grad()
    def _suspects(
        self,
        batch: TensorDict,
        dummy: TensorDict,
        objective: Objective,
        outputs: tuple[str, ...],
        temperature: float,
    ) -> dict[str, list[int]]:
        """Which columns of which rows hold numbers that are not finite: those of the batch, then the model's own.

        Where all of them are finite: which terms of the loss are not.
        """
        found = {}
        columns = {name: column for name, column in batch.items() if isinstance(column, Tensor)}
        columns |= self.compute(batch if len(batch) else dummy, outputs, temperature)
        for name, column in columns.items():
            rows = (~torch.isfinite(column.flatten(1) if column.dim() > 1 else column[:, None])).any(1)
            if rows.any():
                found[name] = rows.nonzero()[:, 0].tolist()
        if len(batch) and not found:
            if "logprobs" in columns and "old_logprobs" not in columns:
                batch = batch.clone(recurse=False).set("old_logprobs", columns["logprobs"])
            found = objective.spoilt_rows(columns, batch)
        return found

    def save_model(self, folder: Path) -> None:
        """Writes the weights as a folder that `from_pretrained` loads, with the tokenizer. A collective.

        A value actor's folder holds its backbone; the head is in the training state. With actor.lora.export=adapter it
        is the folder of an adapter. An average of the weights goes to a second folder, named with _ema behind.
        """
        self._write_model(folder)
        if self.average is not None:
            with self.average.in_network():
                self._write_model(folder.with_name(f"{folder.name}_ema"))

    def _write_model(self, folder: Path) -> None:
        alone = self.adapters if self.adapters is not None and self.adapters.exported_alone else None
        tensors = self.weights() if alone is None else self.strategy.full_tensors(alone.tensors())
        state = {name: tensor.to("cpu", torch.float32) for name, tensor in tensors}
        if self.world.rank != 0:
            return
        self.tokenizer.save_pretrained(folder)
        if alone is not None:
            alone.save(state, folder)
        else:
            model = self.plain_model()
            model.load_state_dict(state, assign=True)
            model.tie_weights()
            transformers_logging.disable_progress_bar()
            model.save_pretrained(folder)

    def state_dict(self) -> dict[str, Any]:
        """Network, optimizer and schedule, whole, on the CPU of rank zero. A collective.

        Frozen weights are left out where they are as they were loaded.
        """
        network = self.strategy.model_state(self.network, with_frozen=not self._as_loaded)
        state: dict[str, Any] = {"network": network, "as_loaded": self._as_loaded}
        if self.optimizer is not None and self.scheduler is not None:
            state["optimizer"] = self.strategy.optimizer_state(self.network, self.optimizer)
            state["scheduler"] = self.scheduler.state_dict()
            state["scale"] = asdict(self.scale)
        if self.average is not None:
            state["average"] = self.average.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], with_optimizer: bool) -> None:
        """Takes up what `state_dict` wrote, on any number of ranks. A collective."""
        self.strategy.load_model_state(self.network, state["network"])
        self._as_loaded = state["as_loaded"]
        self._base_version += 1
        if with_optimizer and "optimizer" in state:
            assert self.optimizer is not None and self.scheduler is not None
            self.strategy.load_optimizer_state(self.network, self.optimizer, state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            self.scale = LossScale(**state["scale"])
            if self.average is not None:
                self.average.load_state_dict(state["average"])


class NonFiniteError(Exception):
    """A loss or gradient that is not finite, with the columns and rows of this rank's mini-batch to look at."""

    def __init__(self, actor: str, suspects: dict[str, list[int]], batch: TensorDict) -> None:
        super().__init__(actor, suspects)
        self.actor = actor
        self.suspects = suspects
        self.batch = batch


def empty_like(model: nn.Module, device: torch.device) -> PreTrainedModel:
    """A copy of a model's structure and buffers. Its parameters are zeros that share one number each, so they take no
    memory until weights are put in their place; ties stay tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        zeros = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(zeros, requires_grad=False)
    return copy.deepcopy(model, memo).to(device)
