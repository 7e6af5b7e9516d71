"""The schema of the config tree: one dataclass for each group. The comments of the yaml files explain most fields."""

from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from transformers import PreTrainedTokenizerBase

from rft.actor.optim.optimizer import Optimizer
from rft.algorithm.options import AlgorithmOptions, options_with_roles
from rft.algorithm.roles import ROLES
from rft.batch.encoded import MediaFacts
from rft.conditions import ANSWERS, GENERATION, GIVEN, SERVED_MODEL, SERVED_REWARD, ReadIf, ReadWith
from rft.data.encode.encoder import Encoder, TrainOn
from rft.data.encode.processor import MediaProcessor
from rft.data.encode.truncation import Overlong, PromptLimit, TextLimit, Truncation
from rft.errors import Unmade
from rft.ranges import NonNegativeInt, PositiveFloat, PositiveInt, SamplingTemperature, Seed, Steps, TopK, TopP
from rft.remote.http_limits import ScoringLimits
from rft.remote.server_process import is_loopback
from rft.rollout.engine.sampling import Sampling
from rft.sanitize import check_metric_name
from rft.train.checkpoint.options import CheckpointOptions
from rft.train.diverged import FaultOptions
from rft.train.folder.run_folder import RESULT
from rft.train.observation import Trajectories


@dataclass
class Batch:
    """The size of a step: prompts over all ranks; optimizer steps = minibatches x epochs."""

    prompts: PositiveInt
    minibatches: PositiveInt
    epochs: PositiveInt
    balance: bool


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


@dataclass
class Eval:
    """When and how held-out sets are evaluated; see `rft.evaluation.generation` and `rft.evaluation.loss`."""

    every: NonNegativeInt
    at_start: bool
    loss: bool
    samples: Annotated[NonNegativeInt, ReadWith(ANSWERS)]
    temperature: Annotated[SamplingTemperature, ReadIf("samples"), ReadWith(ANSWERS)]
    top_p: Annotated[TopP, ReadIf("samples"), ReadWith(ANSWERS)]
    top_k: Annotated[TopK, ReadIf("samples"), ReadWith(ANSWERS)]
    pass_k: Annotated[list[PositiveInt] | None, ReadIf("samples"), ReadWith(ANSWERS)]
    maj_k: Annotated[list[PositiveInt], ReadWith(ANSWERS)]

    def ks(self) -> list[int]:
        """The k of pass@k; by default the powers of two up to `samples`."""
        return [2**power for power in range(self.samples.bit_length())] if self.pass_k is None else self.pass_k

    def sampling(self, rollout: Sampling) -> Sampling:
        """How the answers are sampled: as in training, with another temperature and truncation."""
        return replace(rollout.untruncated(self.temperature), top_p=self.top_p, top_k=self.top_k)


@dataclass(frozen=True)
class Rollout(Sampling):
    """How training samples, and the engine that samples."""

    engine: Any
    engine_args: dict[str, Any] = field(default_factory=dict)  # only the yamls of engines with arguments have this key


@dataclass
class Data:
    """Rows to train on and held-out sets, and how a row becomes a prompt; see `rft.data.encode.encoder`.

    Attributes:
        name: goes into the name of the run.
        eval: held-out sets, by name.
    """

    name: str
    template: str
    template_arguments: dict[str, Any]
    system: str | None
    tools: str | None
    train_on: Annotated[TrainOn, ReadWith(GIVEN)]
    max_prompt_tokens: PositiveInt | None
    truncation: Truncation
    max_tokens: Annotated[PositiveInt | None, ReadWith(GIVEN)]
    overlong: Annotated[Overlong, ReadWith(GIVEN)]
    max_response_tokens: Annotated[PositiveInt, ReadWith(GENERATION)]
    streaming: PositiveInt | None
    shuffle: bool
    train: Any
    eval: dict[str, Any] | None
    path: str | None = None  # only the yaml of data=hub has this key, and its sets interpolate it

    def __post_init__(self) -> None:
        if self.max_prompt_tokens is None and self.truncation != "drop":
            raise ValueError(
                f"data.truncation={self.truncation} has no effect without a limit; set data.max_prompt_tokens, or "
                "data.truncation=drop"
            )
        for name in self.held_out():
            check_metric_name(name, f"data.eval.{name}")

    def held_out(self) -> dict[str, Any]:
        """The nodes of the held-out sets, by name."""
        return {name: node for name, node in (self.eval or {}).items() if node is not None}

    def encoder(
        self, tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None, scored: bool = False
    ) -> Encoder:
        """The encoder, which turns rows into token ids."""
        texts = (self.template, self.system, self.tools, self.train_on, self.template_arguments)
        return Encoder(tokenizer, *texts, self.prompt_limit, processor, scored)

    @property
    def prompt_limit(self) -> PromptLimit | None:
        """What happens to long prompts; None if they have no limit."""
        return None if self.max_prompt_tokens is None else PromptLimit(self.max_prompt_tokens, self.truncation)

    def text_limit(self, context: int, media: MediaFacts | None) -> TextLimit:
        """What happens to long given texts.

        Args:
            context: the model's maximal number of tokens.
            media: what is known of the processor; None without one.

        Raises:
            ValueError: `max_tokens` is over the context.
        """
        if self.max_tokens is not None and self.max_tokens > context:
            raise ValueError(
                f"data.max_tokens={self.max_tokens} is over the model's context of {context}; lower it, or choose a "
                "model with a longer context"
            )
        name = f"the model's context of {context}" if self.max_tokens is None else f"data.max_tokens={self.max_tokens}"
        tokens = frozenset(() if media is None else media.placeholders)
        return TextLimit(self.max_tokens or context, self.overlong, name, tokens)

    def check_apart(self) -> None:
        """Raises a ValueError if a held-out set is the training set."""
        for name, node in self.held_out().items():
            if node == self.train:
                raise ValueError(
                    f"data.train is the same as data.eval.{name}, so nothing is held out; give one of them another path"
                )


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

    checkpoint: Literal["latest", "best"] | NonNegativeInt | None


@dataclass
class Evaluate:
    """What mode=evaluate scores: answers of a model, or given responses; see `rft.evaluation.responses`."""

    checkpoint: Annotated[Literal["latest", "best"] | NonNegativeInt | None, ReadIf("responses", None)]
    responses: str | None
    columns: Annotated[dict[str, str | None], ReadIf("responses")]
    match: Annotated[str, ReadIf("responses")]
    unanswered: Annotated[Literal["error", "skip"], ReadIf("responses")]


@dataclass
class Serve:
    """The servers of mode=serve: of a model, or of reward terms; see `rft.modes.serve`."""

    host: str
    port: PositiveInt
    checkpoint: Annotated[Literal["latest", "best"] | NonNegativeInt | None, ReadWith(SERVED_MODEL)]
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

    def step_count(self) -> int:
        """The steps of the stage `train`. With `epochs` they are known when the rows are counted."""
        assert self.steps is not None, "the rows are not counted yet"
        return self.steps


def root_with_roles() -> type[Run]:
    """The root with one node for every registered role; a run needs those whose columns it reads."""
    nodes = [(role.key, dict[str, Any] | None, None) for role in ROLES]
    own = {"__getattr__": _read_missing}
    return make_dataclass("Run", [("algorithm", options_with_roles()), *nodes], bases=(Run,), namespace=own)


def _read_missing(run: Run, name: str) -> NoReturn:
    """Raises Unmade for a key that the root lacks because of a mistake."""
    if name in {key.name for key in fields(run)}:
        raise Unmade(name)
    raise AttributeError(name)
