"""What a config names, part by part, and every check of it that needs neither data nor a model."""

import importlib
from operator import attrgetter
from typing import Any, cast

from rft.algorithm.method import Method
from rft.algorithm.roles import ROLES
from rft.checks import (
    check_adapters,
    check_architecture,
    check_engine,
    check_flow,
    check_metric,
    check_numbers,
    check_packing,
    check_profile,
    check_source,
    check_tensor_parallel,
    check_training,
)
from rft.options import Run
from rft.problems import Checks, Partial
from rft.registry import Target, sift
from rft.reward.compose import WeightedSum
from rft.rollout.evaluate import measured

FROM_RUN = ("key", "world", "strategy", "tokenizer", "seed")
FROM_ENGINE = ("world", "model", "tokenizer", "folder", "engine_args")
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
            check_engine(run.rollout, self.engine)
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
            numbers = measured(self.reward.names, self.reward.accuracy, run.eval.samples, run.eval.pass_k)
            check_metric(run, numbers)
        with check():
            check_source(self.source.options, self.reward.names, run.algorithm.group_size)
        with check():
            check_flow(run, self.method, self.source.factory)
        self.needs: set[str] = set()
        with check():
            self.needs |= {*self.source.factory.needs(self.source.options), *self.reward.fields}
        with check():
            if run.warmup is not None:
                warmup = run.warmup
                self.warmup_method = check.attempt(lambda: Method(warmup.method(), "warmup"))
                self.warmup_source = check.attempt(lambda: Target(warmup.source, "warmup.source", FROM_ROLLOUT))
                with check():
                    check_flow(run, self.warmup_method, self.warmup_source.factory)
                with check():
                    self.needs |= set(self.warmup_source.factory.needs(self.warmup_source.options))


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
