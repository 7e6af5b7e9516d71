"""The schema of the config tree: one dataclass for each group. The comments of the yaml files explain most fields."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from rft.actor.optim.optimizer import Optimizer
from rft.algorithm.options import AlgorithmOptions, options_with_roles
from rft.algorithm.roles import ROLES
from rft.conditions import SAMPLED, SERVED_MODEL, SERVED_REWARD, ReadIf, ReadWith, unread_fields
from rft.data.options import Data
from rft.errors import Unmade
from rft.evaluation.options import Eval
from rft.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Seed, Steps
from rft.remote.http_limits import ScoringLimits, is_loopback
from rft.rollout.engine.base import Engine, WhileUpdating
from rft.rollout.engine.sampling import Sampling
from rft.rollout.source.base import Ahead
from rft.train.checkpoint.options import CheckpointOptions
from rft.train.diverged import FaultOptions
from rft.train.folder.run_folder import RESULT
from rft.train.observation import Trajectories
from rft.train.stop import seconds_of

UNFIT = r"[/\\\x00-\x1f\ud800-\udfff]"  # in the name of a folder
WhichCheckpoint = Literal["latest", "best"] | NonNegativeInt | None
LONGEST_NAME = 120  # bytes; a folder's name has at most 255, and a sweep appends to it
OF_SAMPLED_ANSWERS = ("rollout", "eval.temperature", "eval.top_p", "eval.top_k", "actor.path", "actor.model_config")


@dataclass
class Batch:
    """The size of a step: prompts over all ranks; optimizer steps = minibatches x epochs."""

    prompts: PositiveInt
    minibatches: PositiveInt
    epochs: PositiveInt
    balance: bool

    def check(self, group_size: int) -> Iterator[str]:
        """Checks that mini-batches divide the rows of a step."""
        rows = self.prompts * group_size
        if rows % self.minibatches:
            yield (
                f"batch.minibatches={self.minibatches} does not divide the {rows} rows of a step (batch.prompts="
                f"{self.prompts} x algorithm.group_size={group_size}); choose a divisor"
            )

    def check_ranks(self, ranks: int) -> Iterator[str]:
        """Checks that the prompts of a step divide over the processes."""
        if self.prompts % ranks:
            yield f"batch.prompts={self.prompts} does not divide over the {ranks} processes"


@dataclass
class Dependency:
    """A run that this one reads.

    Attributes:
        folder: of the run.
        command: that makes the run.
    """

    folder: str
    command: str

    def check(self, key: str) -> None:
        """Raises a ValueError if the run is missing or unfinished; names the key and the command."""
        if not (Path(self.folder) / RESULT).is_file():
            raise ValueError(
                f"{key}.folder={self.folder} holds no finished run; make it with `{self.command}`, or name another"
            )


@dataclass(frozen=True)
class Rollout(Sampling):
    """How training samples, and the engine that samples.

    Attributes:
        staleness: how many versions older than the weights that train the weights that sampled a token may be; 0: each
            step samples its own text. See docs/async.md.
        in_flight: groups that are sampled at a time, over all ranks; null: those of `staleness` + 1 steps.
        while_updating: what becomes of answers that are sampled while new weights arrive. recompute: the server
            computes their keys and values again, with the new weights, and continues. abort: it returns their tokens,
            which are continued as a prompt.
    """

    engine: Any
    staleness: Annotated[NonNegativeInt, ReadWith(SAMPLED)]
    in_flight: Annotated[PositiveInt | None, ReadIf("staleness")]
    while_updating: Annotated[WhileUpdating, ReadIf("staleness")]
    engine_args: dict[str, Any] = field(default_factory=dict)  # only the yamls of engines with arguments have this key

    @property
    def updating(self) -> WhileUpdating | None:
        """`while_updating` where requests can run during an update of the weights; else None."""
        return self.while_updating if self.staleness else None

    def ahead(self, steps: int) -> Ahead | None:
        """How far the text of a stage of so many steps is sampled ahead; None where each step samples its own."""
        return Ahead(self.staleness, self.in_flight, steps) if self.staleness else None


@dataclass
class Profile:
    """The steps that are traced; see `rft.train.observation`."""

    steps: list[PositiveInt]


@dataclass
class Plan:
    """What mode=plan assumes about the run; see `rft.modes.plan.report`."""

    ranks: PositiveInt | None
    prompt_tokens: PositiveInt | None
    offload: bool
    memory_gib: PositiveFloat | None


@dataclass
class Inspect:
    """What mode=inspect shows; see `rft.modes.inspect`."""

    rows: PositiveInt


@dataclass
class Verify:
    """On how many rows mode=verify certifies the reward; see `rft.modes.verify`."""

    rows: NonNegativeInt


@dataclass
class Weights:
    """Which weights a mode loads; see `rft.modes.model`."""

    checkpoint: WhichCheckpoint


@dataclass
class Evaluate:
    """What mode=evaluate scores: answers of a model, or given responses; see `rft.evaluation.responses`."""

    checkpoint: Annotated[WhichCheckpoint, ReadIf("responses", None)]
    responses: str | None
    columns: Annotated[dict[str, str | None], ReadIf("responses")]
    match: Annotated[str, ReadIf("responses")]
    unanswered: Annotated[Literal["error", "skip"], ReadIf("responses")]

    def unread(self) -> dict[str, str]:
        """The reason for every key that mode=evaluate does not read, with `responses` or without."""
        unread = unread_fields(self, "evaluate", lambda part: "")
        if self.responses is not None:
            unread |= dict.fromkeys(OF_SAMPLED_ANSWERS, f"evaluate.responses={self.responses} has the answers")
        return unread


@dataclass
class Serve:
    """The servers of mode=serve: of a model, or of reward terms; see `rft.modes.serve`."""

    host: str
    port: PositiveInt
    checkpoint: Annotated[WhichCheckpoint, ReadWith(SERVED_MODEL)]
    count: Annotated[PositiveInt, ReadWith(SERVED_MODEL)]
    python: Annotated[str | None, ReadWith(SERVED_MODEL)]
    token: str | None
    limits: Annotated[ScoringLimits, ReadWith(SERVED_REWARD)]

    def __post_init__(self) -> None:
        if not 1024 <= self.port <= 65536 - self.count:
            raise ValueError(f"serve.port={self.port}: choose one from 1024 to {65536 - self.count}")
        if not is_loopback(self.host) and self.token is None:
            raise ValueError(
                f"serve.host={self.host}: other machines reach the servers there; set serve.token=<name of an "
                "environment variable> with the token that requests must carry, or serve.host=127.0.0.1"
            )

    def unread(self, engine: type[Engine]) -> dict[str, str]:
        """The reason for every key of `serve` that mode=serve does not read with an engine of this class."""
        absent = {SERVED_MODEL: f"rollout.engine._target_={engine.__name__} has no servers, so reward terms are served"}
        if engine.facts.servers:
            absent = {SERVED_REWARD: "a model is served; rollout=hf serves reward terms"}
        return unread_fields(self, "serve", lambda part: absent.get(part, ""))


@dataclass
class Generate(Weights):
    """The prompts and the output of mode=generate; see `rft.modes.generate`."""

    input: str | None
    prompt: str
    output: str
    samples: PositiveInt
    greedy: bool
    chunk: PositiveInt

    def __post_init__(self) -> None:
        if self.greedy and self.samples > 1:
            raise ValueError(
                f"generate.samples={self.samples}: greedy answers to one prompt are all the same; set it to 1, or "
                "generate.greedy=false"
            )


@dataclass
class Chat(Weights):
    """How mode=chat answers; see `rft.modes.chat`."""

    greedy: bool


@dataclass
class Replay:
    """The step that mode=replay takes again, and what it shows; see `rft.modes.replay.run`."""

    step: PositiveInt | None
    output: str
    tokens: NonNegativeInt


@dataclass
class Warmup:
    """The supervised stage before the reinforcement: at most `steps`, until the watched metric reaches `stop_at`."""

    steps: Steps
    rows: PositiveInt
    stop_at: float | None
    eval_every: NonNegativeInt
    source: Any
    loss: Any
    aggregation: Any
    optimizer: Optimizer

    def algorithm(self) -> AlgorithmOptions:
        """The stage as an algorithm."""
        return AlgorithmOptions(
            name="warmup",
            group_size=1,
            source=self.source,
            advantage=None,
            advantage_clip=None,
            loss=self.loss,
            terms={},
            aggregation=self.aggregation,
            shaping={},
            reward_kl=None,
            turn_rewards=None,
            critic_loss=None,
            prm_loss=None,
            schedules={},
            critic_warmup=0,
            correction=None,
            gradient_mask=None,
            old_logprobs="actor",
            mask_truncated=False,
            mask_tied=False,
            pick="all",
            iteration=0,
            sampler="actor",
        )


@dataclass
class Run:
    """The root; `root_with_roles` adds the nodes of the models beside the policy."""

    name: str
    seed: Seed
    steps: Steps | None
    epochs: PositiveFloat | None
    mode: Literal["train", "verify", "plan", "doctor", "replay", "inspect", "serve", "evaluate", "generate", "chat"]
    output_dir: str
    plugins: list[str]
    cache: str | None
    depends_on: dict[str, Dependency]
    resume: Literal["auto", "never", "fork"] | str
    max_time: str | None
    metric: str | None
    batch: Batch
    eval: Eval
    checkpoint: CheckpointOptions
    faults: FaultOptions
    trajectories: Trajectories
    profile: Profile
    plan: Plan
    inspect: Inspect
    verify: Verify
    serve: Serve
    evaluate: Evaluate
    generate: Generate
    chat: Chat
    replay: Replay
    warmup: Warmup | None
    algorithm: AlgorithmOptions
    actor: dict[str, Any]
    rollout: Rollout
    environment: Any
    reward: Any
    strategy: dict[str, Any]
    data: Data
    logger: dict[str, Any]

    def check_name(self) -> Iterator[str]:
        """Checks that the name of the run can be the name of a folder."""
        name = self.name
        if name in ("", ".", "..") or len(name.encode(errors="surrogatepass")) > LONGEST_NAME or re.search(UNFIT, name):
            yield (
                f"name={name!r}: a run folder has this name: choose 1 to {LONGEST_NAME} bytes without slashes; "
                "output_dir sets where the folder is"
            )

    def check_folders(self) -> Iterator[str]:
        """Checks that `output_dir` and `cache` name folders."""
        output_dir, cache = self.output_dir, self.cache
        if Path(output_dir).name in ("", "..") or "\0" in output_dir:
            yield f"output_dir={output_dir!r}: name a folder of this run's own, such as outputs/first"
        if cache is not None and ("\0" in cache or not cache.strip()):
            yield f"cache={cache!r}: name a folder, or set cache=null to store no token counts"

    def check_time(self) -> None:
        """Raises a ValueError if `max_time` is no duration."""
        if self.max_time is not None:
            seconds_of(self.max_time)

    def check_length(self) -> Iterator[str]:
        """Checks that the run has a length, and one only."""
        steps, epochs, streaming = self.steps, self.epochs, self.data.streaming
        if steps is not None and epochs is not None:
            yield f"epochs={epochs:g}: the run has the length steps={steps}; set steps=null, or epochs=null"
        if steps is None and epochs is None:
            yield "steps=null: the run has no length; set steps, or epochs"
        if epochs is not None and streaming is not None:
            yield (
                f"epochs={epochs:g}: the rows of a stream are not counted; set steps=<number> epochs=null, or "
                "data.streaming=null"
            )

    def check_stop(self, metric: str) -> Iterator[str]:
        """Checks that the warm-up measures the metric that ends it early."""
        if self.warmup is not None and self.warmup.stop_at is not None and not metric.startswith("eval/"):
            stop_at = self.warmup.stop_at
            yield f"warmup.stop_at={stop_at}: no held-out set of data.eval is evaluated; set warmup.stop_at=null"

    def check_profile(self) -> Iterator[str]:
        """Checks that the run has every step that is to be profiled."""
        profiled, steps = self.profile.steps, self.step_count()
        before = self.warmup.steps if self.warmup is not None else 0
        if impossible := [step for step in profiled if not 1 <= step <= before + steps]:
            yield (
                f"profile.steps={impossible}: the steps of this run are 1 to {before + steps} (warmup.steps={before}, "
                f"then steps={steps}); choose among them"
            )

    def step_count(self) -> int:
        """The steps of the stage `train`. With `epochs` they are known when the rows are counted."""
        assert self.steps is not None, "the rows are not counted yet"
        return self.steps


def root_with_roles() -> type[Run]:
    """The root with one node for every registered role; a run needs those whose columns it reads."""
    nodes = [(role.key, dict[str, Any] | None, None) for role in ROLES]
    namespace = {"__getattr__": _read_missing}
    return make_dataclass("Run", [("algorithm", options_with_roles()), *nodes], bases=(Run,), namespace=namespace)


def _read_missing(run: Run, name: str) -> NoReturn:
    """Raises Unmade for a key that the root lacks because of a mistake."""
    if name in {key.name for key in fields(run)}:
        raise Unmade(name)
    raise AttributeError(name)
