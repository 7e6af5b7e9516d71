"""Records the updates of the policy within a step: loss, gradient norm, gradient, and the gradient of every token."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rft.actor.base import ColumnModel, ModelHooks
from rft.algorithm.objective import Objective
from rft.algorithm.roles import POLICY
from rft.algorithm.trajectories import Trajectories
from rft.distributed import World
from rft.metrics import Metrics
from rft.strategy.gather import shard_count, to_local

ROW = "replay_row"  # column of the batch: the number of the row among those of all ranks, (B,) int64
GRAD_NORM = "grad_norm"


@dataclass
class UpdateRecord:
    """One update of the policy.

    Attributes:
        loss: of all rows, with the terms, a scalar.
        grad_norm: of all ranks, before clipping; None if the update was skipped.
        products: of the gradient r of the run and the gradient g of this update: r·r, r·g and g·g, (3,).
        gradient: of the loss with respect to the log-probability of each token, (R, T).
        trained: the tokens in the loss, (R, T) bool.
        ratio: of the current to the old policy at the tokens in the loss, (R, T); 1 elsewhere.
    """

    loss: Tensor
    grad_norm: float | None
    products: Tensor
    gradient: Tensor
    trained: Tensor
    ratio: Tensor


@dataclass
class StepRecord:
    """The updates of one step, taken with one algorithm. All numbers are float64.

    Attributes:
        world: all processes.
        shape: rows on all ranks, and tokens of the longest, (R, T).
        folder: where the gradients of the run are.
        reference: this is the step of the run, so that its gradients are written to the folder.
        updates: of the policy, in order.
    """

    world: World
    shape: tuple[int, int]
    folder: Path
    reference: bool
    updates: list[UpdateRecord] = field(default_factory=list)

    def begin_update(self) -> None:
        """Adds an empty record."""
        zeros = torch.zeros(self.shape, dtype=torch.float64)
        nothing = torch.zeros((), dtype=torch.float64), None, torch.zeros(3, dtype=torch.float64)
        self.updates.append(UpdateRecord(*nothing, zeros, zeros.bool(), zeros + 1))

    def add_tokens(self, loss: Tensor, logprobs: Tensor, batch: TensorDict) -> None:
        """Adds the gradient of a micro-batch with respect to its log-probabilities.

        Args:
            loss: of the micro-batch, a scalar; its graph stays.
            logprobs: of its tokens, (B, T).
            batch: its rows, with `old_logprobs`.
        """
        (of_logprobs,) = torch.autograd.grad(loss, [logprobs], retain_graph=True, materialize_grads=True)
        update, width = self.updates[-1], logprobs.shape[1]
        keep, rows = batch["loss_mask"].cpu(), batch[ROW].cpu()
        ratio = (logprobs.detach() - batch["old_logprobs"]).double().exp().cpu()
        gradient = torch.where(keep, of_logprobs.double().cpu(), 0.0)
        update.gradient[:, :width].index_add_(0, rows, gradient)  # a row that was drawn twice trains twice
        for row, kept, ratios in zip(rows.tolist(), keep, ratio, strict=True):
            update.trained[row, :width] |= kept
            update.ratio[row, :width] = torch.where(kept, ratios, update.ratio[row, :width])

    def add_gradient(self, optimizer: torch.optim.Optimizer) -> None:
        """Writes the gradient of this rank, or adds up its products with the one that was written."""
        path = self.folder / f"gradient_{len(self.updates)}_rank_{self.world.rank}.safetensors"
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        local = {
            str(number): to_local(parameter.grad).detach().cpu().contiguous()
            for number, parameter in enumerate(parameters)
            if parameter.grad is not None
        }
        if self.reference:
            save_file(local, path)
        with safe_open(path, framework="pt") as file:
            saved = set(file.keys())
            for name in sorted(saved | local.keys()):
                nothing = torch.zeros_like(local[name] if name in local else file.get_tensor(name))
                run, own = file.get_tensor(name) if name in saved else nothing, local.get(name, nothing)
                run, own = run.double().flatten(), own.double().flatten()
                products = torch.stack([run @ run, run @ own, own @ own])
                self.updates[-1].products += products / (self.world.size // shard_count(parameters[int(name)]))

    def reduce(self) -> None:
        """Adds up what the ranks have recorded of their rows and shards. A collective."""
        for update in self.updates:
            update.loss, update.products = self.world.all_sum(update.loss), self.world.all_sum(update.products)
            update.gradient = self.world.all_sum(update.gradient)
            update.trained = self.world.all_sum(update.trained.int()) > 0
            update.ratio = self.world.all_sum(update.ratio - 1) + 1


class StepRecorder(ModelHooks):
    """The hooks of every model of a replayed run. They record the updates of the policy within `recording`."""

    def __init__(self) -> None:
        self._record: StepRecord | None = None

    @contextmanager
    def recording(self, record: StepRecord) -> Iterator[None]:
        """The updates in the block are added to the record."""
        self._record = record
        try:
            yield
        finally:
            self._record = None

    @contextmanager
    def on_update(self, model: ColumnModel) -> Iterator[None]:
        """Adds the gradient when the optimizer of the policy steps: there it is summed over ranks, and clipped."""
        record = self._record
        if record is None or model.key != POLICY:
            yield
            return
        record.begin_update()
        added = list[torch.optim.Optimizer]()

        def add(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not added:  # an optimizer may call another one
                added.append(optimizer)
                record.add_gradient(optimizer)

        handle = register_optimizer_step_pre_hook(add)
        try:
            yield
        finally:
            handle.remove()

    def on_retry(self, model: ColumnModel) -> None:
        """Removes the record of the update that is taken again."""
        if self._record is not None and model.key == POLICY:
            self._record.updates.pop()


class RecordedObjective(Objective):
    """An objective that adds the loss and the gradient of every micro-batch to a record.

    Args:
        objective: what it computes.
        record: of the step.
    """

    def __init__(self, objective: Objective, record: StepRecord) -> None:
        super().__init__(objective.terms, objective.mask, objective.corrected)
        self._record = record

    def __call__(
        self, outputs: dict[str, Tensor], batch: TensorDict, trajectories: Trajectories | None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        loss, shares, statistics = super().__call__(outputs, batch, trajectories)
        self._record.updates[-1].loss += loss.detach().double().cpu()
        if "logprobs" in outputs:
            self._record.add_tokens(loss, outputs["logprobs"], batch)
        return loss, shares, statistics


class RecordedMetrics(Metrics):
    """The metrics of a step, which add the gradient norm of every update of the policy to a record, too."""

    def __init__(self, record: StepRecord) -> None:
        super().__init__()
        self._record = record

    def add(self, name: str, total: float | Tensor, weight: float | Tensor = 1.0) -> None:
        super().add(name, total, weight)
        if name == GRAD_NORM:
            self._record.updates[-1].grad_norm = float(total)
