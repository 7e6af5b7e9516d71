"""From the resolved config to objects: cheap checks first, models last."""

import importlib
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
from rft.algorithm.method import Method
from rft.algorithm.roles import ROLES
from rft.balance import Balance
from rft.checkpoint import Checkpoints
from rft.checks import (
    Rows,
    check_adapters,
    check_architecture,
    check_flow,
    check_interruption,
    check_lengths,
    check_metric,
    check_numbers,
    check_profile,
    check_source,
    check_tokenizer,
    check_training,
)
from rft.data.encode import Encoder
from rft.distributed import World, start
from rft.logger.log import RunLog, SilentLog
from rft.options import Run
from rft.profiler import Profiler
from rft.registry import Target, consume
from rft.reward.compose import WeightedSum
from rft.rollout.engine import Engine
from rft.rollout.evaluate import Evaluator, measured
from rft.run_folder import choose_folder, finish_folder
from rft.trainer import Source, Stage, Trainer
from rft.verify import certify

FROM_RUN = ("key", "world", "strategy", "tokenizer", "seed")
FROM_ROLLOUT = (
    "world",
    "engine",
    "encoder",
    "score",
    "rows",
    "prompts",
    "group_size",
    "sampling",
    "seed",
    "columns",
    "logprobs",
)


class Job:
    """A checked config, ready to run.

    Args:
        config: the resolved config as plain containers.

    Raises:
        ValueError: names the yaml key and the cure; nothing slow has been done then.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        for name in config.get("plugins") or ():
            import_plugin(name)
        self.run = run = Run(**consume(config, Run, "", "the root of the config"))
        self.tokenizer = Target(run.actor.pop("tokenizer", None), "actor.tokenizer")
        self.actor = Target(run.actor, "actor", FROM_RUN)
        self.helpers = {role.key: Target(vars(run)[role.key], role.key, FROM_RUN) for role in ROLES}
        for actor in (self.actor, *self.helpers.values()):
            check_architecture(actor.options["model_config"], f"{actor.key}.model_config")
            check_training(actor.options, actor.key)
        check_adapters({actor.key: actor.options for actor in (self.actor, *self.helpers.values())})
        self.strategy = Target(run.strategy, "strategy", ("world",))
        self.engine = Target(run.rollout.engine, "rollout.engine", ("model", "tokenizer"))
        self.source = Target(run.algorithm.source, "algorithm.source", FROM_ROLLOUT)
        self.train = Target(run.data.train, "data.train", ("key",))
        self.held_out = {name: Target(node, f"data.eval.{name}", ("key",)) for name, node in run.data.eval.items()}
        self.reward: WeightedSum = Target(run.reward, "reward").build()
        self.sinks = [Target(node, f"logger.{name}").build() for name, node in run.logger.items()]
        self.method = Method(run.algorithm, "algorithm", self.reward.weights)
        check_numbers(run, self.method)
        check_profile(run)
        check_metric(run, measured(self.reward.names, self.reward.accuracy, run.eval.samples, run.eval.pass_k))
        check_source(self.source.options, self.reward.names, run.algorithm.group_size)
        check_flow(run, self.method, self.source.factory)
        self.needs = {*self.source.factory.needs(self.source.options), *self.reward.fields}
        if run.warmup is not None:
            self.warmup_method = Method(run.warmup.method(), "warmup")
            self.warmup_source = Target(run.warmup.source, "warmup.source", FROM_ROLLOUT)
            check_flow(run, self.warmup_method, self.warmup_source.factory)
            self.needs |= set(self.warmup_source.factory.needs(self.warmup_source.options))
        for sink in self.sinks:
            sink.check()

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
        world = start(run.strategy["device"])
        if run.batch.prompts % world.size:
            raise ValueError(f"batch.prompts={run.batch.prompts} does not divide over the {world.size} processes")
        tokenizer = self.tokenizer.build()
        encoder = Encoder(tokenizer, run.data.template, run.data.system)
        train: Rows = self.train.build(key="data.train").load(sorted(self.needs))
        fields = sorted({"prompt", *self.reward.fields})
        held_out: dict[str, Rows] = {
            name: target.build(key=target.key).load(fields) for name, target in self.held_out.items()
        }
        shape = read_config(run.actor["path"], run.actor["model_config"], len(tokenizer), "actor")
        check_tokenizer(tokenizer, shape)
        for actor in (self.actor, *self.helpers.values()):
            if frozen := actor.options["frozen"]:
                model = read_config(actor.options["path"], actor.options["model_config"], len(tokenizer), actor.key)
                check_frozen(model, actor.options["head"], frozen, actor.key)
        sets = {"data.train": train} | {f"data.eval.{name}": rows for name, rows in held_out.items()}
        check_lengths(encoder, sets, shape, run.rollout.max_new_tokens)
        check_interruption(self.source.options, encoder, run.rollout.max_new_tokens)
        wanted = Path(run.output_dir + suffix)
        folder, said = world.decide(lambda: choose_folder(wanted, self.config, run.resume))
        with RunLog(folder, self.config, self.sinks) if world.rank == 0 else SilentLog() as log:
            if said:
                log.message(said)
            if run.rollout.truncates():
                log.message(
                    "rollout.top_p, top_k, min_p or first_token change the distribution that is sampled, not the one "
                    "that trains: rollout/logprob_gap shows how far the two are apart"
                )
            trainer, stages = self._assemble(world, tokenizer, encoder, train, held_out, folder, log)
            numbers = trainer.fit(stages)
            if missed := [step for step in run.profile.steps if step > trainer.step]:
                log.message(f"profile.steps={missed} did not come: the warm-up was shorter than warmup.steps allows")
            if world.rank == 0:
                finish_folder(folder, numbers)
        return numbers[run.metric]

    def _assemble(
        self,
        world: World,
        tokenizer: PreTrainedTokenizerBase,
        encoder: Encoder,
        train: Rows,
        held_out: dict[str, Rows],
        folder: Path,
        log: RunLog,
    ) -> tuple[Trainer, list[Stage]]:
        run, reads = self.run, self.method.reads()
        strategy = self.strategy.build(world=world)

        def actor(target: Target) -> Actor:
            return target.build(key=target.key, world=world, strategy=strategy, tokenizer=tokenizer, seed=run.seed)

        policy = actor(self.actor)
        helpers: dict[str, Actor] = {}
        for role in ROLES:
            if role.column in reads:
                shares = role.loss is None and policy.adapters is not None and self._starts_as_policy(role.key)
                helpers[role.key] = AdapterReference(policy) if shares else actor(self.helpers[role.key])
        engine: Engine = self.engine.build(model=policy.plain_model(), tokenizer=tokenizer)

        def logprobs(batch: TensorDict) -> Tensor:
            return policy.compute(batch, ("logprobs",), run.rollout.temperature)["logprobs"]

        def source(target: Target, prompts: int, method: Method) -> Source:
            return target.build(
                world=world,
                engine=engine,
                encoder=encoder,
                score=self.reward.score,
                rows=train,
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
            balance=Balance(world, policy.cost, run.batch.balance),
            copies=[helper for key, helper in helpers.items() if self._starts_as_policy(key)],
            engine=engine,
            evaluator=Evaluator(
                world=world,
                engine=engine,
                encoder=encoder,
                score=self.reward.score,
                sets=held_out,
                accuracy=self.reward.accuracy,
                greedy=run.rollout.untruncated(0.0),
                sampling=run.rollout.untruncated(run.eval.temperature),
                samples=run.eval.samples,
                pass_k=run.eval.pass_k,
                seed=run.seed,
            ),
            watched=run.metric,
            log=log,
            checkpoints=Checkpoints(folder, run.checkpoint, world),
            trajectories=run.trajectories,
            profiler=Profiler(run.profile.steps, folder, world, log),
            seed=run.seed,
        )
        return trainer, stages

    def _starts_as_policy(self, key: str) -> bool:
        """True where an actor names the same model as the policy."""
        return all(self.config[key][name] == self.config["actor"][name] for name in ("path", "model_config"))


def import_plugin(name: str) -> None:
    """Imports a module of the user's, so that what it registers can be named in the yaml.

    Raises:
        ValueError: no such module on the path.
    """
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(
            f"plugins: no module {name!r} is found; it is looked for beside the recipe (-cd <folder>) and on PYTHONPATH"
        ) from error
