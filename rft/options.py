"""The root of the config tree: one dataclass a group; what the fields mean stands beside them in the yaml."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rft.actor.optimizer import Optimizer
from rft.algorithm.method import MethodOptions
from rft.checkpoint import CheckpointOptions
from rft.rollout.engine import Sampling
from rft.trainer import Trajectories


@dataclass
class Batch:
    """How much one step holds: prompts over all ranks; optimizer steps = minibatches x epochs."""

    prompts: int
    minibatches: int
    epochs: int
    balance: bool


@dataclass
class Eval:
    """When and how held-out sets are evaluated; see `rft.rollout.evaluate`."""

    every: int
    samples: int
    temperature: float
    pass_k: list[int]


@dataclass(frozen=True)
class Rollout(Sampling):
    """How training samples, and the engine that does it."""

    engine: Any
    engine_args: dict[str, Any] = field(default_factory=dict)  # an engine that takes none has none in its yaml


@dataclass
class Data:
    """Rows to train on and held-out sets, and how a row becomes a prompt; see `rft.data.encode`."""

    name: str
    template: Literal["none", "chat"]
    system: str | None
    train: Any
    eval: dict[str, Any]


@dataclass
class Profile:
    """The steps that are traced; see `rft.profiler`."""

    steps: list[int]


@dataclass
class Plan:
    """What mode=plan supposes of the run; see `rft.plan.page`."""

    ranks: int | None
    prompt_tokens: int | None
    memory_gib: float | None


@dataclass
class Serve:
    """The servers of mode=serve; see `rft.serve`."""

    host: str
    port: int
    count: int
    python: str | None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"serve.count={self.count}: set it to 1 or more")
        if not 1024 <= self.port <= 65536 - self.count:
            raise ValueError(f"serve.port={self.port}: choose one from 1024 to {65536 - self.count}")


@dataclass
class Warmup:
    """The supervised stage before the reinforcement: at most `steps`, until the watched metric reaches `stop_at`."""

    steps: int
    rows: int
    stop_at: float | None
    eval_every: int
    source: Any
    loss: Any
    aggregation: Any
    optimizer: Optimizer

    def method(self) -> MethodOptions:
        """The stage as an algorithm."""
        return MethodOptions(
            name="warmup",
            group_size=1,
            source=self.source,
            advantage=None,
            loss=self.loss,
            terms={},
            aggregation=self.aggregation,
            shaping={},
            reward_kl=None,
            critic_loss=None,
            prm_loss=None,
            critic_warmup=0,
            correction=None,
            gradient_mask=None,
            old_logprobs="actor",
            mask_truncated=False,
            mask_tied=False,
            resample_power=None,
        )


@dataclass
class Run:
    """The root."""

    name: str
    seed: int
    steps: int
    mode: Literal["train", "verify", "plan", "doctor", "serve"]
    output_dir: str
    plugins: list[str]
    resume: bool
    metric: str
    batch: Batch
    eval: Eval
    checkpoint: CheckpointOptions
    trajectories: Trajectories
    profile: Profile
    plan: Plan
    serve: Serve
    warmup: Warmup | None
    algorithm: MethodOptions
    actor: dict[str, Any]
    reference: dict[str, Any]
    critic: dict[str, Any]
    prm: dict[str, Any]
    rollout: Rollout
    reward: Any
    strategy: dict[str, Any]
    data: Data
    logger: dict[str, Any]
