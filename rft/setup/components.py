"""What a config names, part by part, and every check of it that needs neither data nor a model."""

import importlib
from pathlib import Path
from typing import Any, Literal, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rft.actor.base import ColumnModel
from rft.actor.init import CLASSIFIERS
from rft.algorithm.check import build_algorithm
from rft.algorithm.roles import POLICY, REFERENCE, ROLES, Role
from rft.data.base import CheckContext, Source, SourceFacts
from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Lengths
from rft.data.rows.lazy import Rows, load
from rft.data.rows.mixture import Mixture
from rft.data.rows.stream import check_stream
from rft.distributed import SINGLE_PROCESS, World
from rft.errors import Checks, Partial, Problems
from rft.evaluation.base import EvaluationContext, Evaluator
from rft.evaluation.generation import GenerationEvaluator, GenerationOptions, metric_names
from rft.evaluation.preference import PairEvaluator, ScoreEvaluator
from rft.evaluation.process import StepEvaluator
from rft.registry import Target, convert, validate
from rft.reward.compose import WeightedSum
from rft.rollout.engine.base import Engine, EngineContext
from rft.rollout.sampler import Sampler
from rft.setup.constraints import (
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
    check_reference,
    check_training,
)
from rft.setup.renamed import renamed_keys
from rft.setup.schema import Run, root_with_roles
from rft.strategy.base import ModelFacts, Strategy
from rft.train.schedules import SCHEDULES, Schedule

GRADERS: dict[str, type[ScoreEvaluator]] = {"score": PairEvaluator, "step": StepEvaluator}  # by the head of the policy
FROM_RUN = ("context",)
FROM_ENGINE = ("context",)
FROM_STAGE = ("context",)


class Components:
    """The parts of a run, none of them loaded.

    Args:
        config: the resolved config as plain containers.

    Attributes:
        check: what is wrong with them; a part that is wrong itself is missing. `check.end` raises it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        if renamed := renamed_keys(config):
            raise Problems(renamed)
        self.check = check = Checks()
        for name in config.get("plugins") or ():
            with check():
                import_plugin(name)
        root = root_with_roles()
        fields = validate(config, root, "", "the root of the config", check)
        self.run = run = cast(Run, Partial(**fields))
        self._check_actors({role.key: node for role in ROLES if (node := fields.get(role.key)) is not None})
        self.strategy = check.attempt(lambda: strategy_of(run.strategy))
        self.engine = check.attempt(lambda: Target(run.rollout.engine, "rollout.engine", FROM_ENGINE))
        with check():
            check_engine(run.rollout, self.engine, self.actor.options["lora"])
        self.source = check.attempt(lambda: source_of(run.algorithm.source, "algorithm.source"))
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
        self.algorithm = check.attempt(lambda: build_algorithm(run.algorithm, "algorithm", self.reward.weights))
        self.schedules: list[Schedule] = []
        with check():
            for name, node in run.algorithm.schedules.items():
                schedule = check.attempt(lambda n=name, o=node: SCHEDULES.build(o, f"algorithm.schedules.{n}")())
                self.schedules.append(schedule)
        self._check_together()
        for sink in self.sinks:
            with check():
                sink.check()
        if not check.messages:
            self.run = root(**fields)

    def _check_actors(self, nodes: dict[str, Any]) -> None:
        """Checks the policy and the models beside it.

        Args:
            nodes: of the roles that the config has.
        """
        check, run = self.check, self.run
        self.tokenizer = check.attempt(lambda: Target(run.actor.pop("tokenizer", None), "actor.tokenizer"))
        precompute = nodes.get(REFERENCE.key, {}).pop("precompute", False)
        actors, said = {}, set[str]()
        for key in (POLICY, *nodes):
            own = (
                Checks()
            )  # a mistake of the policy is also one of the models that take over its options: report it once
            target = own.attempt(lambda key=key: actor_of(run.actor if key == POLICY else nodes[key], key))
            with own():
                check_model(target)
            check.messages += [text for text in own.messages if text.removeprefix(key) not in said]
            said |= {text.removeprefix(key) for text in own.messages}
            actors[key] = target
        self.actor = actors.pop(POLICY)
        self.helpers = actors
        self.precompute = check.attempt(lambda: convert(precompute, bool, "reference.precompute"))
        with check():
            check_adapters(self.models())

    def _check_together(self) -> None:
        check, run = self.check, self.run
        with check():
            check_numbers(run, self.algorithm)
        with check():
            check_profile(run)
        with check():
            self.strategy.factory.check(self.strategy.options, self.model_facts())
        with check():
            wanted = (run.eval.samples, run.eval.pass_k, run.eval.maj_k)
            answers = metric_names(self.reward.names, self.reward.accuracy, *wanted)
            check_metric(run, answers if self.grader is None else list(self.grader.metrics))
        with check():
            if run.eval.maj_k and not self.reward.extracts:
                raise ValueError(
                    f"eval.maj_k={run.eval.maj_k}: reward.accuracy={self.reward.accuracy} does not tell which answer "
                    "it finds in a response, so there is none to vote on; set eval.maj_k=[] or choose another accuracy"
                )
        with check():
            self.source.factory.check(self.source.options, self.check_context("train"))
        with check():
            check_mixtures(self.held_out)
        with check():
            check_stream(run.data.streaming, self.train)
        self.facts = check.attempt(lambda: facts_of(self.source))
        with check():
            check_flow(run, self.algorithm, self.facts)
        for role in ROLES:
            with check():
                if role.key not in self.helpers and (columns := role.writes(self.algorithm.reads())):
                    raise ValueError(
                        f"{role.key} is missing: something reads {', '.join(columns)}; add `{role.key}: {{_target_: "
                        "<class>, options}`, the model that writes it"
                    )
        with check():
            copied = self.starts_as_policy(REFERENCE)
            check_reference(run.algorithm, self.algorithm, self.facts.sampled != "never", self.precompute, copied)
        self.needs: set[str] = set()
        with check():
            self.needs |= set(self.facts.fields)
            if self.facts.scores:
                self.needs |= set(self.reward.fields)
        with check():
            if run.warmup is not None:
                warmup = run.warmup
                self.warmup_method = check.attempt(lambda: build_algorithm(warmup.algorithm(), "warmup"))
                self.warmup_source = check.attempt(lambda: source_of(warmup.source, "warmup.source"))
                facts = check.attempt(lambda: facts_of(self.warmup_source))
                with check():
                    self.warmup_source.factory.check(self.warmup_source.options, self.check_context("warmup"))
                with check():
                    check_flow(run, self.warmup_method, facts)
                with check():
                    self.needs |= set(facts.fields)
        with check():
            algorithms = {"algorithm": self.algorithm} | (
                {"warmup": self.warmup_method} if run.warmup is not None else {}
            )
            check_head(self.actor.options, algorithms, self.engine.factory)

    def models(self) -> dict[str, dict[str, Any]]:
        """The options of the models whose weights are in this process, by their keys."""
        targets = (self.actor, *self.helpers.values())
        return {target.key: target.options for target in targets if target.factory.has_weights}

    def model_facts(self) -> dict[str, ModelFacts]:
        """What the strategy checks about the models whose weights are in this process, by their keys."""
        facts = {}
        for key, options in self.models().items():
            optimizers = {key: options["optimizer"].name} if options["optimizer"] is not None else {}
            hooked: tuple[str, ...] = ()
            if key == POLICY:
                hooked = tuple(name for name in ("router_balance",) if name in self.algorithm.policy.outputs)
                optimizers |= {} if self.run.warmup is None else {"warmup": self.run.warmup.optimizer.name}
            head = options["head"]
            facts[key] = ModelFacts(head, head in CLASSIFIERS, options["lora"] is not None, optimizers, hooked)
        return facts

    def check_context(self, stage: Literal["warmup", "train"]) -> CheckContext:
        """What a source can be checked against; what is wrong itself skips the checks that look at it."""
        run, check, warmup = self.run, self.check, self.run.warmup
        if stage == "warmup":
            assert warmup is not None
            key, prompts, group_size, algorithm = self.warmup_source.key, warmup.rows, 1, self.warmup_method
        else:
            key, prompts, group_size = self.source.key, run.batch.prompts, run.algorithm.group_size
            algorithm = self.algorithm
        return CheckContext(
            key=key,
            prompts=prompts,
            group_size=group_size,
            max_new_tokens=run.rollout.max_new_tokens,
            reads=check.attempt(algorithm.reads),
            terms=check.attempt(lambda: self.reward.names),
            streaming=run.data.streaming,
            mixture=check.attempt(lambda: self.train.factory is Mixture),
        )

    def starts_as_policy(self, role: Role) -> bool:
        """True where an actor names the same model as the policy, and follows it."""
        if not role.follows or role.key not in self.helpers:
            return False
        own, policy = self.helpers[role.key].options, self.actor.options
        return all(own[name] == policy[name] for name in ("path", "model_config"))

    def check_dependencies(self) -> None:
        """Raises a ValueError where a run that this one reads is not there: what else is wrong comes from that."""
        for name, before in self.run.depends_on.items():
            before.check(f"depends_on.{name}")

    @property
    def grader(self) -> type[ScoreEvaluator] | None:
        """What measures a policy that gives scores and writes no text; None for one that writes."""
        return GRADERS.get(self.actor.options["head"])

    def lengths(self, world: World, encoder: Encoder) -> Lengths:
        """What counts tokens: all ranks together, or each alone where one has found a mistake. A collective."""
        mistaken = any(world.gather(bool(self.check.messages)))
        return Lengths(SINGLE_PROCESS if mistaken else world, encoder, self.run.cache)

    def load_held_out(self) -> dict[str, Rows]:
        """The held-out sets by their names; what is wrong with them is added to `check`."""
        sets: dict[str, Rows] = {}
        fields = ("prompt", *self.reward.fields) if self.grader is None else self.grader.fields
        for name, target in self.held_out.items():
            with self.check():
                sets[name] = load(target, fields)
        with self.check():
            self.reward.check()
        return sets

    def make_engine(
        self, world: World, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
    ) -> Engine:
        """The engine of `rollout`, without weights; see `EngineContext`."""
        context = EngineContext(
            world=world,
            model=model,
            tokenizer=tokenizer,
            folder=folder,
            engine_args=self.run.rollout.engine_args,
            lora=self.actor.options["lora"],
        )
        return self.engine.build(context=context)

    def evaluator(
        self, world: World, policy: ColumnModel | None, sampler: Sampler | None, encoder: Encoder, sets: dict[str, Rows]
    ) -> Evaluator:
        """The evaluator of held-out sets: that of the policy's score head, or else `GenerationEvaluator`.

        Args:
            policy: None if the policy generates text.
            sampler: None if the policy has a score head.
        """
        run, context = self.run, EvaluationContext(world, encoder, sets)
        if self.grader is not None:
            assert policy is not None
            options = {name: self.source.options[name] for name in self.grader.source_options}
            return self.grader(context, lambda batch: policy.compute(batch, ("score",), 1.0)["score"], **options)
        assert sampler is not None
        self.reward.place(world.device)
        drawn = GenerationOptions(
            greedy=run.rollout.untruncated(0.0),
            sampling=run.rollout.untruncated(run.eval.temperature),
            samples=run.eval.samples,
            pass_k=run.eval.pass_k,
            maj_k=run.eval.maj_k,
            seed=run.seed,
        )
        return GenerationEvaluator(context, sampler, self.reward, drawn)


def source_of(node: Any, key: str) -> Target:
    """What makes the batches of a stage.

    Raises:
        ValueError: names the key; among others where the class is no `Source`.
    """
    target = Target(node, key, FROM_STAGE)
    if not (isinstance(target.factory, type) and issubclass(target.factory, Source)):
        raise ValueError(
            f"{key}._target_: {target.factory.__name__} is no source of batches; name a class that implements "
            "rft.data.base.Source"
        )
    return target


def facts_of(source: Target) -> SourceFacts:
    """What a source with the options of its yaml does."""
    facts: SourceFacts = source.factory.facts(source.options)
    return facts


def actor_of(node: Any, key: str) -> Target:
    """What an actor is made of.

    Raises:
        ValueError: names the key; among others where a model that trains or follows the policy has no weights here.
    """
    target = Target(node, key, FROM_RUN)
    name, factory = target.factory.__name__, target.factory
    if not (isinstance(factory, type) and issubclass(factory, ColumnModel)):
        raise ValueError(f"{key}._target_: {name} is no model; name a class that implements rft.actor.base.ColumnModel")
    remote = [role.key for role in ROLES if role.loss is None and not role.follows]
    if key not in remote and not factory.has_weights:
        raise ValueError(f"{key}._target_: {name} has no model here; only a {' or '.join(remote)} can do so")
    return target


def strategy_of(node: Any) -> Target:
    """The strategy of the run.

    Raises:
        ValueError: names the key.
    """
    target = Target(node, "strategy", ("world",))
    if not (isinstance(target.factory, type) and issubclass(target.factory, Strategy)):
        raise ValueError(
            f"strategy._target_: {target.factory.__name__} is no strategy; name a class that implements "
            "rft.strategy.base.Strategy"
        )
    return target


def check_model(target: Target) -> None:
    """Raises a ValueError for options of an actor whose model is in this process."""
    check, options, key = Checks(), target.options, target.key
    if not target.factory.has_weights:
        return
    with check():
        check_architecture(options["model_config"], f"{key}.model_config")
    with check():
        check_training(options, key)
    with check():
        check_packing(options, key)
    check.end()


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
