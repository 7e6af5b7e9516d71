"""An actor: a model that computes columns of the batch and maybe trains. Policy, reference, critic: all this class."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rft.actor.load import blocks, load_model, read_config
from rft.actor.network import LanguageNetwork, ValueNetwork, check_head
from rft.actor.optimizer import Optimizer
from rft.algorithm.mismatch import record_mismatch
from rft.algorithm.objective import Objective
from rft.batch import micro_batches, trim
from rft.distributed import World
from rft.metrics import Metrics
from rft.strategy.fsdp2 import FSDP2


class Actor:
    """One model under a strategy.

    Args:
        key: the actor's place in the yaml ("actor", "critic", "reference"); supplied.
        world, strategy, tokenizer, seed: supplied by the run.
        path: a folder or hub name of a causal language model, or null.
        model_config: a transformers config with `model_type`, for a new model; null where a path is given.
        head: `lm` computes log-probabilities and entropy, `value` computes values.
        micro_batch_tokens: cap on rows x longest row of one forward.
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
        head: Literal["lm", "value"],
        micro_batch_tokens: int,
        optimizer: Optimizer | None,
    ) -> None:
        self.key = key
        self.world = world
        self.strategy = strategy
        self.tokenizer = tokenizer
        self.micro_batch_tokens = micro_batch_tokens
        self.optimizer_options = optimizer
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: torch.optim.lr_scheduler.LambdaLR | None = None
        model = load_model(path, read_config(path, model_config, len(tokenizer), key), seed)
        parts = blocks(model)
        if head == "lm":
            check_head(model, f"{key}.path")
            self._plain = without_weights(model, world.device)
            self.network: LanguageNetwork | ValueNetwork = LanguageNetwork(model)
        else:
            self._plain = without_weights(model.base_model, world.device)
            self.network = ValueNetwork(model.base_model)
        self.network.requires_grad_(optimizer is not None)
        self.network.eval()  # no dropout: old and current log-probabilities are of one function
        strategy.shard(self.network, parts)

    def plain_model(self) -> PreTrainedModel:
        """The unsharded model with no weights yet, for engines of this process and for export."""
        return without_weights(self._plain, self.world.device)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors of the model, one at a time. A collective. On one rank they are not copies."""
        yield from self.strategy.full_tensors(self.network.model)

    @torch.no_grad()
    def start_like(self, other: "Actor") -> None:
        """Takes over the weights of another actor's model; a value head stays as it is.

        Raises:
            ValueError: the two are of different shape.
        """
        mine, theirs = self.network.model, other.network.model
        if isinstance(self.network, ValueNetwork):
            theirs = theirs.base_model
        for (name, parameter), source in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            if parameter.shape != source.shape:
                raise ValueError(f"{self.key}.path: the weights {name} differ in shape from those of {other.key}.path")
            parameter.copy_(source)

    def begin_training(self, optimizer: Optimizer, updates: int) -> None:
        """Makes a new optimizer for a stage of a known number of updates."""
        self.max_grad_norm = optimizer.max_grad_norm
        self.optimizer, self.scheduler = optimizer.build(self.network.parameters(), updates)

    @torch.no_grad()
    def compute(
        self, batch: TensorDict, outputs: tuple[str, ...], temperature: float, idle: TensorDict | None = None
    ) -> dict[str, Tensor]:
        """Columns of the batch, (B, T) each, without gradients. Every rank must take part.

        Args:
            batch: this rank's rows.
            outputs: of `logprobs`, `entropy`, `sum_p_squared`, `values`.
            temperature: what the logits are divided by.
            idle: a row for a rank that has fewer micro-batches than others; None where each has a row of its own.
        """
        zeros = torch.zeros(batch["keep"].shape, device=batch["keep"].device)
        columns = {output: zeros.clone() for output in outputs}
        for rows, micro in self._micro_batches(batch, batch[:1] if idle is None else idle):
            parts = self.network(micro["tokens"], micro["keep"], outputs, temperature)
            for output, part in parts.items():
                columns[output][rows, : part.shape[1]] = part[: len(rows)].to(zeros.device)
        self.strategy.reshard(self.network)
        return columns

    def update(
        self,
        batch: TensorDict,
        idle: TensorDict,
        objective: Objective,
        temperature: float,
        metrics: Metrics,
        watch: tuple[str, ...] = (),
        compare: bool = False,
    ) -> None:
        """One optimizer step over this rank's rows of a mini-batch.

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
        for _, micro in self._micro_batches(batch, idle):
            columns = self.network(micro["tokens"], micro["keep"], outputs, temperature)
            if "logprobs" in columns and "old_logprobs" not in micro.keys():
                micro["old_logprobs"] = columns["logprobs"].detach()
            loss, shares, statistics = objective(columns, micro)
            loss.backward()
            total += loss.detach()
            if compare:
                record_mismatch(metrics, columns["logprobs"].detach(), micro["rollout_logprobs"], micro["keep"])
            statistics |= {name: columns[name] for name in watch}
            mask = micro["tokens", "attention_mask"]
            metrics.add("padding/waste", mask.numel() - mask.sum(), mask.numel())
            for name, share in shares.items():
                metrics.add(name, share, 0.0)
            for name, values in statistics.items():
                metrics.mean(name, values, micro["keep"] if values.dim() > 1 else micro["keep"].any(-1))
        for term in objective.terms:
            metrics.add(f"loss/{term.name}", 0.0, 1.0 / self.world.size)
        assert self.optimizer is not None and self.scheduler is not None
        norm = self.strategy.clip_grad_norm(self.network.parameters(), self.max_grad_norm)
        if not torch.isfinite(norm + self.world.all_sum(total)):  # a clamp may hide a NaN loss from the gradient
            self.optimizer.zero_grad()
            raise Diverged(self.key, self._suspects(batch, idle, objective, outputs, temperature), batch)
        metrics.add(f"{prefix}grad_norm", norm)
        metrics.add(f"{prefix}lr", self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def _micro_batches(self, batch: TensorDict, idle: TensorDict) -> Iterator[tuple[Tensor, TensorDict]]:
        """Row numbers and rows of each micro-batch; the same number on every rank, idle rows where one has fewer."""
        cuts = micro_batches(batch, self.micro_batch_tokens) if len(batch) else []
        count = max(self.world.gather(len(cuts)))
        for rows in cuts:
            yield rows, trim(batch[rows]).to(self.world.device)
        for _ in range(count - len(cuts)):
            yield torch.zeros(0, dtype=torch.int64), trim(idle).to(self.world.device)

    @torch.no_grad()
    def _suspects(
        self,
        batch: TensorDict,
        idle: TensorDict,
        objective: Objective,
        outputs: tuple[str, ...],
        temperature: float,
    ) -> dict[str, list[int]]:
        """Which columns of which rows hold numbers that are not finite: those of the batch, then the model's own.

        Where all of them are finite: which terms of the loss are not.
        """
        found = {}
        columns = {name: column for name, column in batch.items() if isinstance(column, Tensor)}
        columns |= self.compute(batch if len(batch) else idle, outputs, temperature)
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

        A value actor's folder holds its backbone; the head is in the training state.
        """
        state = {name: tensor.cpu() for name, tensor in self.weights()}
        if self.world.rank == 0:
            model = self.plain_model()
            model.load_state_dict(state, assign=True)
            model.tie_weights()
            transformers_logging.disable_progress_bar()
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def state_dict(self) -> dict[str, Any]:
        """Network, optimizer and schedule, whole, on the CPU of rank zero. A collective."""
        state: dict[str, Any] = {"network": self.strategy.model_state(self.network)}
        if self.optimizer is not None and self.scheduler is not None:
            state["optimizer"] = self.strategy.optimizer_state(self.network, self.optimizer)
            state["scheduler"] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], with_optimizer: bool) -> None:
        """Takes up what `state_dict` wrote, on any number of ranks. A collective."""
        self.strategy.load_model_state(self.network, state["network"])
        if with_optimizer and "optimizer" in state:
            assert self.optimizer is not None and self.scheduler is not None
            self.strategy.load_optimizer_state(self.network, self.optimizer, state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])


class Diverged(Exception):
    """A loss or gradient that is not finite, with the columns and rows of this rank's mini-batch to look at."""

    def __init__(self, actor: str, suspects: dict[str, list[int]], batch: TensorDict) -> None:
        super().__init__(actor, suspects)
        self.actor = actor
        self.suspects = suspects
        self.batch = batch


def without_weights(model: nn.Module, device: torch.device) -> PreTrainedModel:
    """A copy of a model's structure and buffers. Its parameters are zeros that share one number each, so they take no
    memory until weights are put in their place; ties stay tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        zeros = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(zeros, requires_grad=False)
    return copy.deepcopy(model, memo).to(device)
