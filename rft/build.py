"""From the resolved config to objects: cheap checks first, models last."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rft.actor.actor import Actor
from rft.actor.frozen import check_frozen
from rft.actor.load import read_config
from rft.actor.reference import AdapterReference
from rft.actor.router import check_routers
from rft.algorithm.method import Method
from rft.algorithm.roles import ROLES
from rft.balance import Balance
from rft.checkpoint import Checkpoints
from rft.checks import check_interruption, check_lengths, check_tokenizer
from rft.data.encode import Encoder
from rft.data.lazy import Rows
from rft.data.lengths import drop_long
from rft.data.survey import check_examples, epoch, only_reads
from rft.distributed import World, start
from rft.logger.log import RunLog, SilentLog
from rft.parts import Parts
from rft.profiler import Profiler
from rft.registry import Target
from rft.rollout.engine import Engine
from rft.rollout.evaluate_pairs import PairEvaluator
from rft.rollout.source import Score
from rft.run_folder import choose_folder, finish_folder
from rft.trainer import Source, Stage, Trainer
from rft.verify import certify


@dataclass
class Loaded:
    """What a run reads before there is a model: rows to train on, and held-out sets by their names."""

    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    train: Rows
    held_out: dict[str, Rows]
    said: list[str] = field(default_factory=list)  # while reading, for people


class Job(Parts):
    """A checked config, ready to run.

    Raises:
        Problems: everything that is wrong, each with its yaml key and the cure; nothing slow has been done then.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.check.end()

    def verify(self) -> float:
        """Prints the certificate of the algorithm's functions and returns 1.0.

        Raises:
            ValueError: a function is not what it states.
        """
        if not certify(self.method, Console()):
            raise ValueError("mode=verify: a part of the algorithm is not what it states; see what is marked ✗")
        return 1.0

    def fit(self, suffix: str) -> float:
        """Loads data and models, trains, and returns the value of the metric that the config names.

        Args:
            suffix: what tells this job of a sweep from the others, in the folder's name; empty outside a sweep.
        """
        run = self.run
        world, loaded = self.begin()
        wanted = Path(run.output_dir + suffix)
        folder, said = world.decide(lambda: choose_folder(wanted, self.config, run.resume))
        with RunLog(folder, self.config, self.sinks) if world.rank == 0 else SilentLog() as log:
            for text in [said, *loaded.said] if said else loaded.said:
                log.message(text)
            if run.rollout.truncates():
                log.message(
                    "rollout.top_p, top_k, min_p or first_token change the distribution that is sampled, not the one "
                    "that trains: rollout/logprob_gap shows how far the two are apart"
                )
            trainer, stages = self.assemble(world, loaded, folder, log)
            try:
                numbers = trainer.fit(stages)
            except BaseException:
                trainer.engine.abort()
                raise
            finally:
                trainer.engine.close()
            if missed := [step for step in run.profile.steps if step > trainer.step]:
                log.message(f"profile.steps={missed} did not come: the warm-up was shorter than warmup.steps allows")
            if world.rank == 0:
                finish_folder(folder, numbers)
        return numbers[run.metric]

    def begin(self) -> tuple[World, Loaded]:
        """Starts the processes and reads what a run reads before there is a model."""
        world = start(self.run.strategy["device"])
        with self.check():
            self.engine.factory.check_here(self.engine.options)
        loaded = self.load(world.size)
        self.check.end()
        return world, loaded

    def check_ranks(self, ranks: int) -> None:
        """Adds to `check` what is wrong where so many processes share the work."""
        with self.check():
            if self.run.batch.prompts % ranks:
                raise ValueError(f"batch.prompts={self.run.batch.prompts} does not divide over the {ranks} processes")

    def load(self, ranks: int) -> Loaded:
        """Loads tokenizer and rows; what is wrong with them, or between them and the rest, is added to `check`.

        Args:
            ranks: processes of the run.
        """
        run, check = self.run, self.check
        self.check_ranks(ranks)
        tokenizer = check.attempt(lambda: self.tokenizer.build())
        encoder = check.attempt(
            lambda: Encoder(tokenizer, run.data.template, run.data.system, run.data.tools, run.data.trains)
        )
        train: Rows = check.attempt(lambda: self.train.build(key="data.train").load(sorted(self.needs)))
        held_out = self.load_held_out()
        with check():
            run.data.check_apart()
        said: list[str] = []
        most = run.data.max_prompt_tokens
        with check():
            if most is not None and "prompt" not in self.needs:
                raise ValueError(
                    f"data.max_prompt_tokens={most}: rows that are conversations or texts have no prompts; set "
                    "data.max_prompt_tokens=null"
                )
            train = drop_long(train, encoder, most, "data.train", said.append)
        for name, rows in held_out.items():
            with check():
                held_out[name] = drop_long(rows, encoder, most, f"data.eval.{name}", said.append)
        with check():
            shape = read_config(run.actor["path"], run.actor["model_config"], len(tokenizer), "actor")
            with check():
                check_tokenizer(tokenizer, shape)
            with check():
                if "router_balance" in self.method.policy.outputs:
                    strategy = self.strategy.options
                    check_routers(shape, strategy["compile"], strategy["context_parallel"])
            with check():
                if only_reads(self.source):
                    check_examples(self.examples(encoder, train), shape.get_text_config().max_position_embeddings)
            sets = {} if only_reads(self.source) else {"data.train": train}
            for key, rows in (sets | {f"data.eval.{name}": rows for name, rows in held_out.items()}).items():
                with check():
                    check_lengths(encoder, {key: rows}, shape, run.rollout.max_new_tokens)
        for actor in (self.actor, *self.helpers.values()):
            with check():
                if frozen := actor.options["frozen"]:
                    model = read_config(actor.options["path"], actor.options["model_config"], len(tokenizer), actor.key)
                    check_frozen(model, actor.options["head"], frozen, actor.key)
        with check():
            check_interruption(self.source.options, encoder, run.rollout.max_new_tokens)
        return Loaded(tokenizer, encoder, train, held_out, said)

    def examples(self, encoder: Encoder, rows: Rows) -> Iterator[TensorDict]:
        """What a run without samples trains on, step by step, until as many rows are drawn as there are."""
        run, columns = self.run, tuple(sorted(self.method.reads()))
        return epoch(self.source, encoder, rows, run.batch.prompts, seed=run.seed, columns=columns)

    def assemble(
        self,
        world: World,
        loaded: Loaded,
        folder: Path,
        log: RunLog,
        answering: Callable[[Engine], Engine] = lambda engine: engine,
        score: Score | None = None,
    ) -> tuple[Trainer, list[Stage]]:
        """Builds the models and what moves them.

        Args:
            folder, log: of the run.
            answering: what the sources of batches are given in place of the engine.
            score: in place of the reward.
        """
        run, reads = self.run, self.method.reads()
        strategy = self.strategy.build(world=world)

        def actor(target: Target) -> Actor:
            shared = {"world": world, "strategy": strategy, "tokenizer": loaded.tokenizer, "seed": run.seed}
            return target.build(key=target.key, **shared)

        policy = actor(self.actor)
        helpers: dict[str, Actor] = {}
        for role in ROLES:
            if role.column in reads:
                shares = role.loss is None and policy.adapters is not None and self._starts_as_policy(role.key)
                helpers[role.key] = AdapterReference(policy) if shares else actor(self.helpers[role.key])
        engine = self.start_engine(world, policy, loaded, folder)

        def logprobs(batch: TensorDict) -> Tensor:
            return policy.compute(batch, ("logprobs",), run.rollout.temperature)["logprobs"]

        def scores(batch: TensorDict) -> Tensor:
            return policy.compute(batch, ("score",), 1.0)["score"].sum(1)

        def source(target: Target, prompts: int, method: Method) -> Source:
            return target.build(
                world=world,
                engine=answering(engine),
                encoder=loaded.encoder,
                score=score or self.reward.score,
                rows=loaded.train,
                prompts=prompts,
                group_size=run.algorithm.group_size,
                sampling=run.rollout,
                seed=run.seed,
                columns=tuple(sorted(method.reads())),
                logprobs=logprobs,
            )

        stages = []
        if run.warmup is not None:
            stages.append(
                Stage(
                    name="warmup",
                    source=source(self.warmup_source, run.warmup.rows, self.warmup_method),
                    method=self.warmup_method,
                    steps=run.warmup.steps,
                    minibatches=1,
                    epochs=1,
                    optimizer=run.warmup.optimizer,
                    eval_every=run.warmup.eval_every,
                    stop_at=run.warmup.stop_at,
                )
            )
        assert policy.optimizer_options is not None
        stages.append(
            Stage(
                name="train",
                source=source(self.source, run.batch.prompts, self.method),
                method=self.method,
                steps=run.steps,
                minibatches=run.batch.minibatches,
                epochs=run.batch.epochs,
                optimizer=policy.optimizer_options,
                eval_every=run.eval.every,
                stop_at=None,
            )
        )
        trainer = Trainer(
            world=world,
            policy=policy,
            helpers=helpers,
            balance=Balance(world, policy.work, "group" if policy.cutting.share_prefix else "unit", run.batch.balance),
            copies=[helper for key, helper in helpers.items() if self._starts_as_policy(key)],
            engine=engine,
            evaluator=PairEvaluator(world, loaded.encoder, scores, loaded.held_out)
            if self.gives_scores
            else self.evaluator(world, engine, loaded.encoder, loaded.held_out),
            watched=run.metric,
            log=log,
            checkpoints=Checkpoints(folder, run.checkpoint, world),
            trajectories=run.trajectories,
            profiler=Profiler(run.profile.steps, folder, world, log),
            seed=run.seed,
        )
        return trainer, stages

    def start_engine(self, world: World, policy: Actor, loaded: Loaded, folder: Path) -> Engine:
        """What samples, with no weights yet."""
        return self.make_engine(world, policy.plain_model(), loaded.tokenizer, folder)

    def _starts_as_policy(self, key: str) -> bool:
        """True where an actor names the same model as the policy."""
        return all(self.config[key][name] == self.config["actor"][name] for name in ("path", "model_config"))
