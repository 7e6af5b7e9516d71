"""The protocol of a strategy: how models are spread over the processes of a run, and how they train there.

A strategy of your own is a class with these methods, named by `strategy._target_`; its options are a frozen dataclass,
which it names as its `Options`. Nothing outside of the two reads a field of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rft.distributed import World, device_kind, missing_capability, start
from rft.strategy.attention import CAPABILITY, Attention
from rft.strategy.context import Context
from rft.strategy.gather import WHOLE, GatherOptions
from rft.strategy.gradients import LossScale

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO = "auto"
HOST = " (CPU)"  # ends the names of terms of mode=plan that are in host memory
# labels of `record_function`: mode=plan counts what is allocated under them as host memory
OFFLOADED_ACTIVATIONS, OFFLOADED_OPTIMIZER = "offload activations", "offload optimizer"
MakeOptimizer = Callable[[], tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]]


def chosen_dtype(dtype: str, device: str) -> str:
    """The name of a dtype; `auto` is bfloat16 on a GPU that computes in it (Ampere or later), float32 elsewhere."""
    if dtype != AUTO:
        return dtype
    return "bfloat16" if device_kind(device) == "cuda" and missing_capability(CAPABILITY) is None else "float32"


@dataclass(frozen=True)
class ModelFacts:
    """What a strategy can check about a model of the run from the config alone.

    Attributes:
        head: of the model: `lm`, `value`, `score` or `step`.
        own_rows: the head reads the states of whole rows, so ranks cannot compute one sequence together.
        lora: adapters train in place of the model's own weights.
        optimizers: the names of the optimizers that train it, by their yaml keys.
        hooked: outputs that forward hooks inside the blocks record.
        partly_frozen: some of its weights do not train: it has adapters or frozen parameters.
        quantized: its frozen weights are packed.
        media: it takes media.
        liger: Liger's kernels compute parts of it, which need a GPU.
    """

    head: str
    own_rows: bool = False
    lora: bool = False
    optimizers: Mapping[str, str] = field(default_factory=dict)
    hooked: tuple[str, ...] = ()
    partly_frozen: bool = False
    quantized: bool = False
    media: bool = False
    liger: bool = False


@dataclass
class TrainState:
    """What trains a network: the optimizer, its schedule and the loss scale.

    Attributes:
        max_grad_norm: the global gradient norm is clipped to this; infinity: it is not clipped.
    """

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scale: LossScale
    max_grad_norm: float

    def lr(self) -> float:
        """The learning rate of the next step, of parameters whose factor is 1."""
        lr: float = self.optimizer.defaults["lr"] * self.scheduler.lr_lambdas[0](self.scheduler.last_epoch)
        return lr


class StepResult(NamedTuple):
    """The outcome of an optimizer step.

    Attributes:
        loss: summed over all ranks.
        grad_norm: before clipping, over all ranks.
        lr: the learning rate of the step, of parameters whose factor is 1.
        finite: False where the loss or the gradient is not finite; the weights are unchanged then.
    """

    loss: Tensor
    grad_norm: Tensor
    lr: float
    finite: bool


@dataclass(frozen=True)
class StrategyOptions:
    """The options of a strategy, and what a run asks of them before there is a strategy.

    A strategy without options needs no class of its own for them.
    """

    def device_name(self) -> str:
        """Where to compute: `auto` (CUDA where there is a device), `cpu` or `cuda`. Read before the processes start."""
        return "auto"

    def settled(self) -> dict[str, Any]:
        """The options that leave a choice, each with what is chosen on this machine. The run writes them down."""
        return {}

    def join(self) -> World:
        """Joins the processes of the run. What must be set before the device is first used is set here."""
        return start(self.device_name())

    def compute_dtype(self) -> str:
        """The name of the dtype that forward and backward compute in."""
        return "float32"

    def reference_options(self, dtype: str) -> "StrategyOptions":
        """The options of the plainest strategy of this class that computes in a dtype.

        `mode=doctor` compares the log-probabilities of the run with those of a model under it.

        Raises:
            ValueError: this strategy cannot compute in that dtype; names the key.
        """
        if dtype != self.compute_dtype():
            raise ValueError(f"strategy._target_: this strategy cannot compute in {dtype}")
        return self

    def rounding_options(self) -> dict[str, Any]:
        """Those options that make models that train round more than the dtype does; null turns each of them off.

        The models of `reference_options` do not have them. `mode=doctor` names them as a cause.
        """
        return {}

    def scoring_options(self, dtype: str, offload: bool) -> "StrategyOptions":
        """The options of the strategy of this class that shards a model which scores texts and never trains.

        Each rank computes rows of its own.

        Args:
            dtype: of the weights and the computation.
            offload: the weights are in host memory, and are copied to the device block by block.

        Raises:
            ValueError: this strategy cannot do so; names the key.
        """
        if offload or dtype != self.compute_dtype():
            how = f"in {dtype}" if not offload else "with weights in host memory"
            raise ValueError(
                f"reward.shard=true: the strategy (strategy._target_) cannot compute {how}; set reward.shard=false"
            )
        return self

    def check(self, models: Mapping[str, ModelFacts]) -> None:
        """Checks the options against each other and the models of the run, before anything is loaded.

        Args:
            models: by their yaml keys.

        Raises:
            ValueError: names the key and the cure.
        """

    def unset_offloads(self) -> list[tuple[str, Any]]:
        """The options that would move memory to the host and are not set, each with its value; see `mode=plan`."""
        return []


class Strategy(ABC):
    """How the models of a run are spread over its processes.

    The life of a model: `StrategyOptions.check` (the config), `check_model` (the architecture), `parallelize`, `shard`,
    `materialize`, then `begin_training` and, for each update, `backward` for every micro-batch and one `step`.

    Args:
        options: an object of `Options`.
        world: all processes.
        context: the ranks that compute one sequence together, or None where each rank computes its own rows.
        attention: what computes the attention of packed rows.
        device_type: of the devices of the run, if they are not those of this process (`mode=plan`).
        compile: models compile what they compute beside the blocks, which `shard` compiles.

    Attributes:
        Options: the class of the options.
        dtype: what forward and backward compute in; the weights of frozen models are stored in it.
        shards_meta: `shard` takes parameters on the meta device, and `materialize` gives them memory. Otherwise every
            process loads the whole model before `shard`.
        memory_labels: for `mode=plan`: beginnings of the labels of `torch.profiler.record_function` under which the
            strategy or its library allocates tensors, and the term that these tensors count for.
    """

    Options: ClassVar[type[StrategyOptions]] = StrategyOptions
    shards_meta: ClassVar[bool] = False
    memory_labels: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        options: StrategyOptions,
        world: World,
        context: Context | None = None,
        attention: Attention = "auto",
        device_type: str | None = None,
        compile: bool = False,
    ) -> None:
        self.options = options
        self.world = world
        self.dtype = DTYPES[options.compute_dtype()]
        self.context = context
        self.attention = attention
        self.device_type = device_type or world.device.type
        self.compile = compile

    def check_model(
        self, config: PretrainedConfig, meta_model: Callable[[], PreTrainedModel], packing: bool, key: str
    ) -> None:
        """Checks an architecture before its weights are loaded.

        Args:
            config: of the model.
            meta_model: makes the model on the meta device; parameters that train require a gradient.
            packing: rows of a forward lie behind one another.
            key: the model's place in the yaml.

        Raises:
            ValueError: the model cannot be spread; names the key.
        """

    def parallelize(self, backbone: PreTrainedModel, key: str) -> None:
        """Splits layers in place among the ranks of `context`; called before `shard`.

        Args:
            backbone: of the model with this yaml key.
        """

    def peak_tflops(self) -> float | None:
        """The peak speed of one process's device, for `throughput/mfu`; None if it is not known."""
        return None

    def offloads(self, trains: bool) -> bool:
        """Whether the weights of a network, with gradients and optimizer state, are in host memory.

        Args:
            trains: some of its weights train.
        """
        return False

    @abstractmethod
    def shard(self, network: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Moves a network to the device of this process and spreads its weights, in place.

        Args:
            network: its parameter names stay as they are.
            blocks: parts of the network that are computed one after another.
        """

    def materialize(self, network: nn.Module) -> None:
        """Gives memory to the shards that `shard` has left on the meta device; they are filled afterwards."""

    def loss_scale(self) -> LossScale:
        """The factor of the loss before the backward pass; it moves only where gradients are float16."""
        moves = self.dtype == torch.float16
        return LossScale(factor=2.0**16 if moves else 1.0, moves=moves)

    def begin_training(self, network: nn.Module, make: MakeOptimizer, max_grad_norm: float) -> TrainState:
        """The optimizer of a sharded network, for a stage.

        Args:
            make: makes the optimizer and its schedule for the network's parameters as they are now.
            max_grad_norm: the global gradient norm is clipped to this; infinity: it is not clipped.
        """
        optimizer, scheduler = make()
        return TrainState(optimizer, scheduler, self.loss_scale(), max_grad_norm)

    @abstractmethod
    def backward(self, network: nn.Module, loss: Tensor, last: bool) -> None:
        """Adds the gradient of one micro-batch. Gradients are summed over ranks, not averaged.

        Args:
            loss: of this rank, divided by global counts already.
            last: no other micro-batch of the update follows.
        """

    @abstractmethod
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clips the global gradient norm and returns what it was. A collective."""

    def step(self, network: nn.Module, state: TrainState, loss: Tensor) -> StepResult:
        """One update of the weights from the gradients that `backward` added up. A collective.

        Where the loss or the gradient is not finite on any rank, the gradients are dropped and nothing moves.

        Args:
            loss: the sum of this rank's losses, a scalar.
        """
        state.scale.unscale(network.parameters())
        with self.world.wait.during("the norm of the gradient"):
            norm = self.clip_grad_norm(network.parameters(), state.max_grad_norm)
        total = self.world.all_sum(loss)
        finite = bool(torch.isfinite(norm + total))  # a clamp may hide a NaN loss from the gradient
        result = StepResult(total, norm, state.lr(), finite)
        if finite:
            state.optimizer.step()
            state.scheduler.step()
            state.scale.advance()
        state.optimizer.zero_grad()
        return result

    def reshard(self, network: nn.Module) -> None:
        """Frees what a forward without a backward has gathered."""

    @abstractmethod
    def full_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], options: GatherOptions = WHOLE
    ) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors from sharded ones, one at a time. A collective: every rank reads it to its end.

        With `options.sharded` tensors whose rows are sharded stay so, and every rank gets every name. On one rank they
        may share the storage of what is given.

        Args:
            options: what the reader needs; a strategy may yield more, and tensors of more bytes.
        """

    @abstractmethod
    def model_state(self, network: nn.Module, with_frozen: bool) -> dict[str, Any]:
        """The network's tensors by name, spread over the ranks as they are and not copied; a tied one once.

        Args:
            with_frozen: includes parameters that do not train.
        """

    @abstractmethod
    def load_model_state(self, network: nn.Module, state: dict[str, Any]) -> None:
        """Takes over tensors that are spread as those of `model_state`; they may be its tensors, filled in place.

        Frozen weights that the state does not hold stay as they are.
        """

    @abstractmethod
    def optimizer_state(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer, its tensors spread over the ranks as they are and not copied. A collective."""

    def allocate_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives a new optimizer its state tensors, into which a checkpoint is loaded; the weights may change.

        A collective. Torch's optimizers allocate in their first step, so this is one with gradients of zero.
        """
        if optimizer.state:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    @abstractmethod
    def load_optimizer_state(self, network: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Takes over what `optimizer_state` returned, its tensors maybe filled in place. A collective."""

    def train_state(self, network: nn.Module, state: TrainState) -> dict[str, Any]:
        """The optimizer, its schedule and the loss scale for a checkpoint. A collective."""
        return {
            "optimizer": self.optimizer_state(network, state.optimizer),
            "scheduler": state.scheduler.state_dict(),
            "scale": asdict(state.scale),
        }

    def load_train_state(self, network: nn.Module, state: TrainState, saved: Mapping[str, Any]) -> None:
        """Loads what `train_state` returned. A collective."""
        self.load_optimizer_state(network, state.optimizer, saved["optimizer"])
        state.scheduler.load_state_dict(saved["scheduler"])
        state.scale = LossScale(**saved["scale"])
