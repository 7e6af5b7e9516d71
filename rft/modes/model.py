"""The model of mode=evaluate, generate and chat: a checkpoint of a run, or the model that `actor` names."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rft.actor.forward.logits import vocabulary_size
from rft.actor.init import load_model, read_config
from rft.actor.model import add_end_tokens, empty_like
from rft.algorithm.roles import POLICY
from rft.data.encode.tokenizer import pretrained
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.errors import Check, checks, part
from rft.evaluation.base import Evaluator
from rft.imports import import_part
from rft.logger.console import RunConsole
from rft.logger.history import rank_key
from rft.logger.log import SilentLog
from rft.rollout.sampler import EngineSampler, Sampler
from rft.setup.components import Components, PolicyParts
from rft.setup.loadable import check_vocabulary
from rft.setup.schema import WhichCheckpoint
from rft.train.checkpoint.manifest import read_manifest
from rft.train.checkpoint.names import checkpoints_in, step_of
from rft.train.folder.run_folder import CHECKPOINTS, CONFIG, scratch


class FoundPolicy(PolicyParts):
    """The policy of a checkpoint, or the model that `actor` names.

    Args:
        job: the checked config.
        found: the model folder of the checkpoint; None for the model that `actor` names.

    Attributes:
        options: of the policy.
    """

    def __init__(self, job: Components, checkpoint: Path | None) -> None:
        super().__init__(job)
        self.checkpoint = checkpoint
        options = job.actor.options
        self.options = options if checkpoint is None else replace(options, path=str(checkpoint), model_config=None)

    @part
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self.checkpoint is not None:
            return pretrained(path=str(self.checkpoint), trust_remote_code=self.options.trust_remote_code)
        made: PreTrainedTokenizerBase = self.job.tokenizer.build()
        return made

    @part
    def model_config(self) -> PretrainedConfig:
        options, size, media = self.options, vocabulary_size(self.tokenizer), self.processor is not None
        return read_config(options.path, options.model_config, size, POLICY, options.trust_remote_code, media)

    @checks
    def _config(self) -> Iterator[Check]:
        yield from self.check_config()
        if (path := self.options.path) is not None:
            yield lambda: check_vocabulary(self.model_config, self.tokenizer, path, POLICY)


class Answering(Components):
    """A checked config of a mode that only samples or scores: nothing trains, and no training rows are read.

    Args:
        config: the resolved config as plain containers.

    Attributes:
        world: the processes; set by the mode.
        title: the path or hub name of the model, for display; set by `find`.

    Raises:
        Problems: everything that is wrong with the config, each with its yaml key and the cure.
    """

    world: World
    policy: FoundPolicy

    def find(self, which: WhichCheckpoint, key: str) -> None:
        """Finds model and tokenizer; mistakes in them are added to `check`. A collective.

        Args:
            which: the latest or best checkpoint of the run in output_dir, or that of a step. None is the model that
                `actor` names; so is `latest` if output_dir holds no run.
            key: the yaml key of `which`, for messages.

        Raises:
            ValueError: there is no such checkpoint, or the engine cannot run on this machine.
        """
        run, check = self.run, self.check
        self.check_dependencies()
        scores = run.mode == "evaluate" and (self.grader is not None or self.given is not None)
        if not self.engine.factory.facts.samples and not scores:
            raise ValueError(f"mode={run.mode}: rollout=none cannot sample; choose another engine, such as rollout=hf")
        self.engine.options.check_here()
        self.place_reward(self.world)
        checkpoint = self.world.decide(lambda: find_checkpoint(Path(run.output_dir), which, key))
        self.policy = FoundPolicy(self, checkpoint)
        self.policy.check_all()
        actor = self.policy.options
        self.title = actor.path or f"a new {actor.model_config['model_type']}, untrained"
        if scores and self.grader is not None and checkpoint is not None:
            head, where = actor.head, f"{key}={which}: {checkpoint}"
            check_classifier = import_part("rft.actor.scorers", "check_classifier", f"actor.head={head}")
            check.run(lambda: check_classifier(self.policy.model_config, head, where))

    @contextmanager
    def measuring(self, sets: dict[str, Rows]) -> Iterator[Evaluator]:
        """The evaluator of held-out sets, with the weights of the model. A collective."""
        if self.grader is None and self.given is None:
            with self.started() as sampler, closing(self.reward):
                yield self.evaluator(self.world, {}, sampler, self.policy.encoder, sets)
        else:
            transformers_logging.disable_progress_bar()
            strategy = self.strategy.build(world=self.world)
            options = replace(self.policy.options, optimizer=None, frozen=[], ema=None)
            context = self.policy_context(self.world, strategy, self.policy.tokenizer, self.policy.encoder)
            policy = self.actor.factory(context=context, options=options)
            yield self.evaluator(self.world, {POLICY: policy}, None, self.policy.encoder, sets)

    @contextmanager
    def started(self) -> Iterator[Sampler]:
        """The sampler with the weights of the model. A collective."""
        run = self.run
        with scratch(self.world, run.output_dir, run.mode) as folder:
            transformers_logging.disable_progress_bar()
            model = load_model(self.policy.options.path, self.policy.model_config, run.seed)
            plain, media = empty_like(model, self.world.device), self.policy.encoder.media_facts
            add_end_tokens(plain, self.policy.encoder.ends)
            engine = self.make_engine(self.world, plain, self.policy.tokenizer, folder, media)
            sampler = EngineSampler(engine)
            try:
                sampler.publish(0, model.state_dict().items())
                del model
                yield sampler
            except BaseException:
                sampler.abort()
                raise
            finally:
                sampler.close()


@contextmanager
def display(world: World, console: Console) -> Iterator[RunConsole | SilentLog]:
    """Shows progress and messages on the console of rank zero."""
    if world.rank != 0:
        yield SilentLog()
        return
    shown = RunConsole(console)
    try:
        yield shown
    finally:
        shown.stop()


def find_checkpoint(folder: Path, which: WhichCheckpoint, key: str) -> Path | None:
    """The model folder of a checkpoint of a run, or None for the model that `actor` names.

    Args:
        folder: of the run.
        which, key: see `Answering.find`.

    Raises:
        ValueError: there is no such checkpoint; names the key and the existing ones.
    """
    if which is None or (which == "latest" and not (folder / CONFIG).is_file()):
        return None
    cure = f"set output_dir to the folder of a run, or {key}=null for the model that actor names"
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{key}={which}: output_dir={folder} holds no run; {cure}")
    steps = {step_of(path): path for path in checkpoints_in(folder / CHECKPOINTS) if (path / "actor").is_dir()}
    if not steps:
        raise ValueError(f"{key}={which}: the run in output_dir={folder} has no checkpoint yet; {cure}")
    known = ", ".join(map(str, sorted(steps)))
    if which == "latest":
        step = max(steps)
    elif which == "best":
        watched = OmegaConf.load(folder / CONFIG).metric
        metrics = {step: read_manifest(path)["metric"] for step, path in steps.items()}
        evaluated = [(rank_key(watched, metric), step) for step, metric in metrics.items() if metric is not None]
        if not evaluated:
            raise ValueError(
                f"{key}=best: none of the checkpoints of {folder} was evaluated; set {key} to latest or one of {known}"
            )
        step = max(evaluated)[1]
    elif which in steps:
        step = which
    else:
        raise ValueError(
            f"{key}={which}: {folder} has no checkpoint of this step; its checkpoints are of the steps {known}"
        )
    return steps[step] / "actor"
