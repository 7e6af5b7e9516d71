"""Builds the objects of a run from the resolved config: cheap checks first, models last."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from rft.actor.base import ColumnModel, ModelContext, TrainableModel, trainable
from rft.actor.optim.optimizer import Optimizer
from rft.algorithm.algorithm import Algorithm
from rft.algorithm.roles import POLICY, REFERENCE, ROLES
from rft.batch.balance import Balance
from rft.batch.scores import Scoring
from rft.batch.trajectory import plain_fields
from rft.data.base import Source, given_texts
from rft.data.datasets import Datasets
from rft.data.encode.lengths import Lengths
from rft.data.encode.limits import check_lengths, fit_prompts
from rft.data.row_checks import check_held_out
from rft.distributed import SINGLE_PROCESS, World, raise_peer_failure
from rft.errors import surviving
from rft.evaluation.base import Canary, metric_value
from rft.imports import import_part
from rft.logger.log import RunLog, SilentLog, Store
from rft.logger.redact import public_config
from rft.registry import Target
from rft.report.run_page import RUN_REPORT
from rft.rollout.sampler import EngineSampler
from rft.rollout.source.base import RolloutContext
from rft.setup.components import Components
from rft.setup.loadable import RunParts
from rft.setup.unread import notices, unread_keys
from rft.train.checkpoint.checkpoints import Checkpoints
from rft.train.diverged import nonfinite_policy
from rft.train.folder.resume import STEPS
from rft.train.folder.run_folder import REF_LOGPROBS, RunCommand, RunFolder, choose_folder, finish_folder
from rft.train.folder.run_lock import RunLock
from rft.train.memory import MakePlan, explain_out_of_memory, no_plan
from rft.train.observation import Profiler
from rft.train.records import Output, Trained, Watch
from rft.train.stage import Stage
from rft.train.stop import StopRequest, recording_stop
from rft.train.trainer import Trainer
from rft.train.unsaved import UnsavedMemory


@dataclass(frozen=True)
class Changes:
    """What a mode changes in the objects of a run.

    Attributes:
        scoring: replaces that of the reward; None for that of the reward.
        faults: the folder for the rows of an update that is not finite; None for that of the run.
        last_step: the run stops after it; None where the config alone decides.
        evaluates, probes: the held-out sets are evaluated, the canary tasks are answered.
        ahead: text is sampled ahead of its steps, as far as the config says.
    """

    scoring: Callable[[], Scoring] | None = None
    faults: Path | None = None
    last_step: int | None = None
    evaluates: bool = True
    probes: bool = True
    ahead: bool = True


class Job(Components):
    """A checked config, ready to run; see `Components`."""

    def fit(self, suffix: str, make_plan: MakePlan = no_plan) -> float:
        """Loads data and models, trains, and returns the value of the metric that the config names.

        Args:
            suffix: appended to the folder's name, different for each job of a sweep; empty outside a sweep.
            make_plan: see `explain_out_of_memory`.
        """
        world = self.join()
        watchdog = self.watchdog(world)
        with watchdog, RunLock() as lock:
            loaded = self.prepare(world)
            command = self.run_command(suffix)
            chosen: RunFolder = world.decide(lambda: choose_folder(command, lock))
            numbers = self.train_in(chosen, world, loaded, make_plan, watchdog)
            world.decide(lambda: finish_folder(chosen.path, numbers))
        return metric_value(numbers, self.metric)

    def run_command(self, suffix: str) -> RunCommand:
        """What decides which folder the run gets."""
        reads = self.algorithm.reads()
        models = [self.actor, *(self.helpers[role.key] for role in ROLES if role.writes(reads))]
        optimizers = [model.options.optimizer for model in models if model.factory.has_weights]
        decays = any(optimizer is not None and optimizer.decays for optimizer in optimizers)
        unread = frozenset({*unread_keys(self), *(() if decays else STEPS)})
        wanted = Path(self.run.output_dir + suffix)
        return RunCommand(wanted, public_config(self.config), self.run.step_count(), unread)

    def train_in(
        self,
        chosen: RunFolder,
        world: World,
        loaded: Datasets,
        make_plan: MakePlan,
        watchdog: AbstractContextManager[Any],
    ) -> dict[str, float]:
        """Loads the models and trains in a run folder; returns the last value of every metric."""
        run, folder, public = self.run, chosen.path, public_config(self.config)
        opened: RunLog = SilentLog()
        if world.rank == 0:
            opened = RunLog(folder, public, self.sinks, report=RUN_REPORT, store=self.store())
        with recording_stop(world, folder), opened as log, watchdog:  # the log gets the first error of any rank
            for text in [*chosen.messages, *loaded.messages, *notices(run, self.algorithm, self.exact())]:
                log.message(text)
            trainer, stages = self.assemble(world, loaded, folder, log, chosen=chosen)
            try:
                with trainer.watch.stop, explain_out_of_memory(trainer, self.config, make_plan):
                    numbers = trainer.fit(stages)
            except BaseException:
                trainer.sampler.abort()
                raise
            finally:
                closed = {"checkpoints": trainer.checkpoints.close, "sampler": trainer.sampler.close}
                for name, close in {**closed, "reward": self.reward.close}.items():
                    with surviving(f"closing the {name}", log.warning):
                        close()
            if missed := [step for step in run.profile.steps if step > trainer.step]:
                log.message(f"profile.steps={missed} were not reached: the warm-up stopped before warmup.steps")
        return numbers

    def store(self) -> Store:
        """Makes rows of sampled texts such that JSON can hold them; media become files of the run."""
        if self.processor is None:
            return lambda row, run, folder: plain_fields(row)
        store: Store = import_part("rft.data.encode.media.folder", "store_media", "actor.processor")
        return store

    def prepare(self, world: World) -> Datasets:
        """Loads the tokenizer and the rows. A collective."""
        self.check.attempt(self.engine.options.check_here)
        self.check.attempt(self.place_reward, world)
        loaded = self.load(world.size, world)
        self.check.end()
        for role in ROLES:
            if role.writes(self.algorithm.reads()):
                model = self.helpers[role.key]
                model.options.check_here(world, loaded.tokenizer, lambda: self.longest(loaded))
        return loaded

    def load(self, ranks: int, world: World = SINGLE_PROCESS) -> Datasets:
        """Loads tokenizer and rows. Mistakes in them, and mismatches with the model, are added to `check`.

        Args:
            ranks: processes of the run.
            world: the processes that read the rows.

        Raises:
            Problems: the tokenizer or the rows to train on cannot be read.
        """
        run, check, made = self.run, self.check, RunParts(self)
        self.policy = made
        self.check_dependencies()
        check.run(run.batch.check_ranks, ranks)
        made.check_all()
        counting = self.counting_world(world)
        if made.unmade & {"tokenizer", "encoder", "train"} or self.processor is not None:
            check.end()  # a processor takes long to count the tokens of all rows
        canary = made.if_made(lambda: made.canary) or ()
        lengths = Lengths(counting, made.encoder, run.cache)
        loaded = Datasets(made.tokenizer, made.encoder, made.train, made.held_out, lengths, made.stream, canary)
        others = {name: rows for name, rows in loaded.held_out.items() if run.data.held_out()[name] != run.data.train}
        compared = ("prompt",) if self.grader is None else self.grader.fields
        check.run(check_held_out, made.train, others, compared, counting, loaded.messages.append)
        check.run(lambda: self.fit_rows(loaded, made.context))
        if run.epochs is not None:
            loaded.messages.append(self.count_steps(len(loaded.train)))
        return loaded

    def fit_rows(self, loaded: Datasets, context: int) -> None:
        """Applies `data.truncation` and `data.overlong`, and adds a message to `check` for rows that are too long.

        Args:
            context: most tokens of a text that the policy reads.

        Raises:
            ValueError: data.max_prompt_tokens is set, but the rows have no prompts; or a canary task is too long.
        """
        run, check, log = self.run, self.check, loaded.messages.append
        most, new_tokens = run.data.max_prompt_tokens, run.rollout.max_new_tokens
        prompted, samples = "prompt" in self.needs, self.facts.sampled != "never"
        sources = [self.source] if self.warmup_source is None else [self.warmup_source, self.source]
        stages = [given_texts(source.factory, source.options) for source in sources]
        if most is not None and not prompted:
            raise ValueError(
                f"data.max_prompt_tokens={most}: rows that are conversations or texts have no prompts; set "
                "data.max_prompt_tokens=null"
            )
        if loaded.stream is not None:
            assert run.data.streaming is not None
            log(f"data.train is streamed: only its first {len(loaded.train)} rows were checked")
            if samples:
                key = f"data.streaming={run.data.streaming}"
                check_room = import_part("rft.data.encode.stream_limits", "check_room", key)
                check.attempt(check_room, run.data.streaming, most, context, new_tokens)
        elif most is not None or (samples and prompted):
            check.attempt(loaded.fit_prompts, context, new_tokens if samples else None)
        if loaded.stream is None and len(loaded.train) < run.batch.prompts:
            log(
                f"data.train has {len(loaded.train)} rows, fewer than batch.prompts={run.batch.prompts}: rows repeat "
                "within a step"
            )
        given = self.held_out_given
        if given is None:
            self.fit_held_out(loaded.held_out, loaded.lengths, context, None, log)
        mistakes = len(check.messages)
        text_limit = check.attempt(run.data.text_limit, context, loaded.encoder.media_facts)
        if text_limit is not None:
            for stage in stages:
                loaded.longest_text = None
                if stage is not None:
                    check.attempt(loaded.fit_texts, stage, text_limit)
            if given is not None:
                self.fit_held_out(loaded.held_out, loaded.lengths, context, (text_limit, given), log)
        if len(check.messages) == mistakes:  # else mode=inspect shows the rows as they are
            loaded.encoder.text_limit = text_limit
        if loaded.canary:
            _, counts = fit_prompts("reward.canary.path", loaded.canary, loaded.lengths, None, log)
            check_lengths("reward.canary.path", counts, context, new_tokens)

    def longest(self, loaded: Datasets) -> int | None:
        """Tokens of the longest row that a step can have; None for a stream, whose rows are not counted."""
        if loaded.stream is not None:
            return None
        counts = [] if loaded.longest_text is None else [loaded.longest_text]
        if self.facts.sampled != "never" and "prompt" in self.needs:
            prompt = int(loaded.lengths.prompts(loaded.train).max())
            counts.append(
                prompt + self.run.rollout.max_new_tokens
                if self.environments is None
                else min(prompt + self.environments.max_tokens, self.policy.context)
            )
        return max(counts, default=None)

    def assemble(
        self,
        world: World,
        loaded: Datasets,
        folder: Path,
        log: RunLog,
        chosen: RunFolder | None = None,
        changes: Changes | None = None,
    ) -> tuple[Trainer, list[Stage]]:
        """Builds the models, the sampler, the sources and the trainer.

        Args:
            folder, log: of the run.
            chosen: the folder of the run; None where no run is continued.
            changes: of the mode; None for no changes.
        """
        run, changes = self.run, changes or Changes()
        models = self.build_models(self.model_context(world, loaded), folder)
        policy = trainable(models[POLICY])
        sampler = self.start_sampler(world, policy, loaded, folder)

        def logprobs(batch: TensorDict) -> Tensor:
            return policy.compute(batch, ("logprobs",), run.rollout.temperature)["logprobs"]

        def source(target: Target, prompts: int, algorithm: Algorithm, steps: int) -> Source:
            context = RolloutContext(
                world=world,
                seed=run.seed,
                encoder=loaded.encoder,
                rows=loaded.rows(run.data.streaming, given_texts(target.factory, target.options), log.message),
                prompts=prompts,
                columns=tuple(sorted(algorithm.reads())),
                shuffle=run.data.shuffle,
                sampler=sampler,
                answerer=answerer,
                group_size=run.algorithm.group_size,
                sampling=run.rollout,
                scoring=changes.scoring or self.reward.begin,
                logprobs=logprobs,
                ahead=run.rollout.ahead(steps) if changes.ahead else None,
            )
            made: Source = target.build(context=context)
            return made

        answerer = self.answerer(loaded.encoder, sampler)
        assert policy.optimizer_options is not None
        stages = self.build_stages(source, policy.optimizer_options)
        evaluator = self.evaluator(world, models, sampler, loaded.encoder, loaded.held_out)
        canary: Canary | None = None
        if loaded.canary and changes.probes:
            canary = import_part("rft.evaluation.canary", "CanaryProbe", "reward.canary.path")(
                world=world,
                encoder=loaded.encoder,
                sampler=sampler,
                reward=self.reward,
                rows=loaded.canary,
                sampling=run.rollout,
                seed=run.seed,
            )
        trained = Trained(
            models,
            copies=[models[role.key] for role in ROLES if role.key in models and self.starts_as_policy(role)],
            balance=Balance(world, policy.work, policy.balance_unit, run.batch.balance),
            sampler=sampler,
        )
        output = Output(
            log,
            Checkpoints(folder, run.checkpoint, world, self.metric, log.warning, chosen),
            run.trajectories,
            Profiler(run.profile.steps, folder, world, log),
            loaded.fingerprints(),
        )
        watch = Watch(
            evaluator=evaluator if loaded.held_out and changes.evaluates else None,
            evaluates_at_start=run.eval.at_start,
            canary=canary,
            nonfinite=nonfinite_policy(run.faults)(run.faults, changes.faults or folder, world, log),
            stop=StopRequest(run.max_time, world.rank, raise_peer_failure, changes.last_step),
            unsaved=UnsavedMemory(self.without_state()),
            exact=self.exact(),
            max_unscored=self.reward.max_unscored,
        )
        return Trainer(trained, output, watch), stages

    def build_models(self, context: ModelContext, folder: Path) -> dict[str, ColumnModel]:
        """The policy, and the models beside it whose columns the algorithm reads, by their keys."""

        def model(target: Target) -> ColumnModel:
            made: ColumnModel = target.build(context=context.of(target.key))
            return made

        reads, policy = self.algorithm.reads(), trainable(model(self.actor))
        models: dict[str, ColumnModel] = {POLICY: policy}
        for role in ROLES:
            if role.writes(reads):
                copied = self.starts_as_policy(role)
                if role is REFERENCE and self.precompute:
                    load = (lambda: policy) if copied else partial(model, self.helpers[role.key])
                    file = folder / REF_LOGPROBS
                    reference = import_part(
                        "rft.actor.reference", "PrecomputedReference", f"{role.key}.precompute=true"
                    )
                    models[role.key] = reference(context.of(role.key), load, copied, file)
                else:
                    shared = policy.frozen_copy(role.key) if copied and role.loss is None else None
                    models[role.key] = shared or model(self.helpers[role.key])
        return models

    def build_stages(self, source: Callable[..., Source], optimizer: Optimizer) -> list[Stage]:
        """The stages of the run.

        Args:
            source: builds a source that draws so many prompts a step for an algorithm, and for so many steps.
            optimizer: of the policy in the last stage.
        """
        run, stages = self.run, []
        if run.warmup is not None:
            assert self.warmup_source is not None and self.warmup_algorithm is not None
            stages.append(
                Stage(
                    name="warmup",
                    source=source(self.warmup_source, run.warmup.rows, self.warmup_algorithm, run.warmup.steps),
                    algorithm=self.warmup_algorithm,
                    steps=run.warmup.steps,
                    optimizer=run.warmup.optimizer,
                    eval_every=run.warmup.eval_every,
                    stop_at=run.warmup.stop_at,
                )
            )
        stages.append(
            Stage(
                name="train",
                source=source(self.source, run.batch.prompts, self.algorithm, run.step_count()),
                algorithm=self.algorithm,
                steps=run.step_count(),
                optimizer=optimizer,
                eval_every=run.eval.every,
                minibatches=run.batch.minibatches,
                epochs=run.batch.epochs,
                sampler=run.algorithm.sampler,
                schedules=[*self.schedules.values()],
            )
        )
        return stages

    def model_context(self, world: World, loaded: Datasets) -> ModelContext:
        """What every model of the run shares, with the key of the policy. A mode may override it to add hooks."""
        strategy = self.strategy.build(world=world)
        return self.policy_context(world, strategy, loaded.tokenizer, loaded.encoder)

    def start_sampler(self, world: World, policy: TrainableModel, loaded: Datasets, folder: Path) -> EngineSampler:
        """The sampler of the run, without weights. A mode may override it to change how the engine samples."""
        media = loaded.encoder.media_facts
        return EngineSampler(self.make_engine(world, policy.plain_model(), loaded.tokenizer, folder, media))
