"""What a config names, part by part, and every check of it that needs neither data nor a model."""

import importlib
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rft.algorithm.method import Method
from rft.algorithm.roles import ROLES
from rft.checks import (
    check_adapters,
    check_architecture,
    check_engine,
    check_flow,
    check_head,
    check_metric,
    check_mixtures,
    check_numbers,
    check_packing,
    check_profile,
    check_source,
    check_tensor_parallel,
    check_training,
)
from rft.data.encode import Encoder
from rft.data.lazy import Rows
from rft.distributed import World
from rft.options import Run
from rft.problems import Checks, Partial
from rft.registry import Target, sift
from rft.reward.compose import WeightedSum
from rft.rollout.engine import Engine
from rft.rollout.evaluate import Evaluator, measured
from rft.rollout.evaluate_pairs import FIELDS, MEASURED

FROM_RUN = ("key", "world", "strategy", "tokenizer", "seed")
FROM_ENGINE = ("world", "model", "tokenizer", "folder", "engine_args", "lora")
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


class Parts:
    """The parts of a run, none of them loaded.

    Args:
        config: the resolved config as plain containers.

    Attributes:
        check: what is wrong with them; a part that is wrong itself is missing. `check.end` raises it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.check = check = Checks()
        for name in config.get("plugins") or ():
            with check():
                import_plugin(name)
        fields = sift(config, Run, "", "the root of the config", check)
        self.run = run = cast(Run, Partial(**fields))
        self._check_actors()
        self.strategy = check.attempt(lambda: Target(run.strategy, "strategy", ("world",)))
        self.engine = check.attempt(lambda: Target(run.rollout.engine, "rollout.engine", FROM_ENGINE))
        with check():
            check_engine(run.rollout, self.engine, self.actor.options["lora"])
        self.source = check.attempt(lambda: Target(run.algorithm.source, "algorithm.source", FROM_ROLLOUT))
        self.train = check.attempt(lambda: Target(run.data.train, "data.train", ("key",)))
        self.held_out: dict[str, Target] = {}
        with check():
            for name, node in run.data.eval.items():
                self.held_out[name] = check.attempt(Target, node, f"data.eval.{name}", ("key",))
        self.reward: WeightedSum = check.attempt(lambda: Target(run.reward, "reward").build())
        self.sinks = []
        with check():
            for name, node in run.logger.items():
                self.sinks.append(check.attempt(lambda n=name, o=node: Target(o, f"logger.{n}").build()))
        self.method = check.attempt(lambda: Method(run.algorithm, "algorithm", self.reward.weights))
        self._check_together()
        for sink in self.sinks:
            with check():
                sink.check()
        if not check.messages:
            self.run = Run(**fields)

    def _check_actors(self) -> None:
        check, run = self.check, self.run
        self.tokenizer = check.attempt(lambda: Target(run.actor.pop("tokenizer", None), "actor.tokenizer"))
        actors, said = {}, set[str]()
        for key in ("actor", *(role.key for role in ROLES)):
            own = Checks()  # what is wrong with the actor is so with those that take over its options; it is said once
            target = own.attempt(lambda key=key: Target(attrgetter(key)(run), key, FROM_RUN))
            with own():
                check_architecture(target.options["model_config"], f"{key}.model_config")
            with own():
                check_training(target.options, key)
            with own():
                check_packing(target.options, key)
            check.messages += [text for text in own.messages if text.removeprefix(key) not in said]
            said |= {text.removeprefix(key) for text in own.messages}
            actors[key] = target
        self.actor = actors.pop("actor")
        self.helpers = actors
        with check():
            check_adapters({target.key: target.options for target in (self.actor, *self.helpers.values())})

    def _check_together(self) -> None:
        check, run = self.check, self.run
        with check():
            check_numbers(run, self.method)
        with check():
            check_profile(run)
        with check():
            actors = {target.key: target.options for target in (self.actor, *self.helpers.values())}
            check_tensor_parallel(self.strategy.options.get("tensor_parallel", 1), actors, run.warmup)
        with check():
            wanted = (run.eval.samples, run.eval.pass_k, run.eval.maj_k)
            answers = measured(self.reward.names, self.reward.accuracy, *wanted)
            check_metric(run, list(MEASURED) if self.gives_scores else answers)
        with check():
            if run.eval.maj_k and not self.reward.extracts:
                raise ValueError(
                    f"eval.maj_k={run.eval.maj_k}: reward.accuracy={self.reward.accuracy} does not tell which answer "
                    "it finds in a response, so there is none to vote on; set eval.maj_k=[] or choose another accuracy"
                )
        with check():
            check_source(self.source.options, self.reward.names, run.algorithm.group_size)
        with check():
            check_mixtures(self.train, self.held_out, self.source)
        with check():
            check_flow(run, self.method, self.source)
        self.needs: set[str] = set()
        with check():
            self.needs |= set(self.source.factory.needs(self.source.options))
            if "scores" in self.source.factory.writes:
                self.needs |= set(self.reward.fields)
        with check():
            if run.warmup is not None:
                warmup = run.warmup
                self.warmup_method = check.attempt(lambda: Method(warmup.method(), "warmup"))
                self.warmup_source = check.attempt(lambda: Target(warmup.source, "warmup.source", FROM_ROLLOUT))
                with check():
                    check_flow(run, self.warmup_method, self.warmup_source)
                with check():
                    self.needs |= set(self.warmup_source.factory.needs(self.warmup_source.options))
        with check():
            methods = {"algorithm": self.method} | ({"warmup": self.warmup_method} if run.warmup is not None else {})
            check_head(self.actor.options, methods, self.engine.factory, self.strategy.options)

    @property
    def gives_scores(self) -> bool:
        """Whether the policy gives scores and writes no text."""
        return bool(self.actor.options["head"] == "score")

    def load_held_out(self) -> dict[str, Rows]:
        """The held-out sets by their names; what is wrong with them is added to `check`."""
        sets: dict[str, Rows] = {}
        fields = FIELDS if self.gives_scores else ("prompt", *self.reward.fields)
        for name, target in self.held_out.items():
            with self.check():
                sets[name] = target.build(key=target.key).load(sorted(set(fields)))
        with self.check():
            self.reward.check()
        return sets

    def make_engine(
        self, world: World, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
    ) -> Engine:
        """What samples, with no weights yet; see `FROM_ENGINE`."""
        supplied = {"world": world, "model": model, "tokenizer": tokenizer, "folder": folder}
        supplied |= {"engine_args": self.run.rollout.engine_args, "lora": self.actor.options["lora"]}
        return self.engine.build(**supplied)

    def evaluator(self, world: World, engine: Engine, encoder: Encoder, sets: dict[str, Rows]) -> Evaluator:
        """What measures how well the engine answers held-out sets."""
        run = self.run
        self.reward.place(world.device)
        return Evaluator(
            world=world,
            engine=engine,
            encoder=encoder,
            score=self.reward.score,
            extract=self.reward.extract,
            sets=sets,
            accuracy=self.reward.accuracy,
            greedy=run.rollout.untruncated(0.0),
            sampling=run.rollout.untruncated(run.eval.temperature),
            samples=run.eval.samples,
            pass_k=run.eval.pass_k,
            maj_k=run.eval.maj_k,
            seed=run.seed,
        )


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
