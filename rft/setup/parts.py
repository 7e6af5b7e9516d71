"""The parts that a config names.

`Parts` reads top to bottom: each part is an attribute made of those above it. See `rft.errors.Checked`.
"""

from dataclasses import fields
from functools import partial
from typing import Any

from rft.actor.forward.backbone import ROUTER_BALANCE
from rft.actor.init import SCORING
from rft.actor.options import ActorOptions
from rft.algorithm.algorithm import Algorithm
from rft.algorithm.check import build_algorithm
from rft.algorithm.roles import POLICY, REFERENCE, ROLES, Role
from rft.data.base import CheckContext, GivenTexts, SourceFacts, given_texts
from rft.data.rows.base import is_weighted
from rft.errors import Checked, Checks, Unmade, build_each, did_you_mean, part
from rft.evaluation.base import ScoreEvaluator, other_name
from rft.evaluation.options import grader_of
from rft.imports import import_plugin
from rft.logger.log import Sink
from rft.registry import Target, convert, validate
from rft.reward.compose import WeightedSum
from rft.rollout.answerer import Episodes, episodes_of
from rft.rollout.engine.base import Engine, EngineOptions
from rft.setup.classes import actor_of, class_of, facts_of, processor_of, source_of, strategy_of
from rft.setup.schema import Run, root_with_roles
from rft.strategy.base import ModelFacts
from rft.train.schedules import SCHEDULES, Schedule


class Parts(Checked):
    """The parts of a run; classes are not built where that takes data or a model.

    Mistakes are reported in the order of the parts below.

    Args:
        config: the resolved config as plain containers.

    Attributes:
        run: the root of the config. A key with a mistake is an unmade part.
        tokenizer, actor, strategy, engine, source, train: classes with their options, not built yet. So are `helpers`
            (the models beside the policy, by role), `held_out` (the held-out sets by name), `processor` (None for a
            model of text) and `warmup_source` (None without a warm-up).
        algorithm, warmup_algorithm, reward, schedules, sinks: built objects.
        environments: of episodes; None where a completion is the whole answer.
        facts: what the source states about itself.
        given: makes the batches of held-out texts whose loss is evaluated; None if it is not.
        grader: scores held-out texts by the head of the policy; None if the policy has none that scores.
        answers: whether the policy answers the prompts of held-out sets.
        metric: the one that the config names, or the main one of the run.
        check_context: what the source checks its options against.
        needs: the fields that every training row must have.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        plugins = config.get("plugins")
        for name in plugins if isinstance(plugins, list) else ():  # `validate` refuses other types
            if isinstance(name, str):
                self.check.run(partial(import_plugin, name, "plugins"))
        root = root_with_roles()
        values, messages = validate(config, root, "", "the root of the config")
        self.check.messages += messages
        self.run = object.__new__(root)
        vars(self.run).update(values)
        self._nodes = {role.key: values.get(role.key) for role in ROLES if config.get(role.key) is not None}

    @part
    def root(self) -> Run:
        """The run whose keys are all without mistakes."""
        if missing := {key.name for key in fields(self.run)} - vars(self.run).keys():
            raise Unmade(*missing)
        return self.run

    @part
    def tokenizer(self) -> Target:
        return Target(self.run.actor.pop("tokenizer", None), "actor.tokenizer")

    @part
    def processor(self) -> Target | None:
        return processor_of(self.run.actor)

    @part
    def precompute(self) -> bool:
        return convert((self._nodes.get(REFERENCE.key) or {}).pop("precompute", False), bool, "reference.precompute")

    @part
    def _made_models(self) -> dict[str, Target]:
        """The models whose nodes name a class, by their keys.

        Other models inherit options of the policy; a mistake in an inherited option is reported once.
        """
        made, reported, policy = dict[str, Target](), set[str](), self.if_made(lambda: self.run.actor)
        for key, node in {POLICY: policy, **self._nodes}.items():
            if node is None:
                continue
            checks = Checks()
            if (model := checks.attempt(actor_of, node, key)) is not None:
                made[key] = model
                checks.run(partial(model.options.errors, key))
            self.check.messages += [text for text in checks.messages if text.removeprefix(key) not in reported]
            reported |= {text.removeprefix(key) for text in checks.messages}
        return made

    def _checked_model(self, key: str) -> Target:
        if key not in self._made_models:
            raise Unmade(key)
        return self._made_models[key]

    @part
    def actor(self) -> Target:
        return self._checked_model(POLICY)

    @part
    def helpers(self) -> dict[str, Target]:
        return {key: self._checked_model(key) for key in self._nodes}

    @part
    def models(self) -> dict[str, ActorOptions]:
        """The options of the models whose weights are in this process, by their keys."""
        targets = (self.actor, *self.helpers.values())
        return {target.key: target.options for target in targets if target.factory.has_weights}

    @part
    def strategy(self) -> Target:
        return strategy_of(self.run.strategy)

    @part
    def engine(self) -> Target:
        return class_of(self.run.rollout.engine, "rollout.engine", Engine, EngineOptions, "engine")

    @part
    def environments(self) -> Episodes | None:
        return episodes_of(self.run.environment)

    @part
    def source(self) -> Target:
        return source_of(self.run.algorithm.source, "algorithm.source")

    @part
    def facts(self) -> SourceFacts:
        return facts_of(self.source, self.environments)

    @part
    def train(self) -> Target:
        return Target(self.run.data.train, "data.train", ("key",))

    @part
    def held_out(self) -> dict[str, Target]:
        return build_each(lambda name, node: Target(node, f"data.eval.{name}", ("key",)), self.run.data.held_out())

    @part
    def reward(self) -> WeightedSum:
        reward: WeightedSum = Target(self.run.reward, "reward").build()
        return reward

    @part
    def sinks(self) -> list[Sink]:
        return [*build_each(lambda name, node: Target(node, f"logger.{name}").build(), self.run.logger).values()]

    @part
    def algorithm(self) -> Algorithm:
        return build_algorithm(self.run.algorithm, "algorithm", self.reward.weights)

    @part
    def schedules(self) -> dict[str, Schedule]:
        nodes = self.run.algorithm.schedules
        return build_each(lambda name, node: SCHEDULES.build(node, f"algorithm.schedules.{name}")(), nodes)

    @part
    def grader(self) -> type[ScoreEvaluator] | None:
        return grader_of(self.actor.options.head)

    @part
    def given(self) -> GivenTexts | None:
        evaluation, source, facts = self.run.eval, self.source, self.facts
        if evaluation.loss and facts.sampled != "never":
            raise ValueError(
                "eval.loss=true: the engine samples texts that train, so held-out rows alone have no loss; set "
                "eval.loss=false, which scores answers to held-out prompts"
            )
        return given_texts(source.factory, source.options) if evaluation.loss else None

    @part
    def answers(self) -> bool:
        return bool(self.run.data.held_out()) and self.grader is None and self.given is None

    @part
    def metrics(self) -> list[str]:
        """The metrics of the run's evaluations, the main one first; without held-out sets, the loss of training."""
        sets = self.run.data.held_out()
        numbers = self.run.eval.metrics(self.reward, self.grader, self.given, self.algorithm)
        names = [f"eval/{name}/{number}" for name in sets for number in numbers]
        return names or [f"loss/{self.algorithm.policy.terms[0].name}"]

    @part
    def metric(self) -> str:
        metric, names = self.run.metric, self.metrics
        if metric is not None and metric not in names and other_name(metric) not in names:
            raise ValueError(
                f"metric={metric}: the run has no such metric{did_you_mean(metric, names)} (known: {', '.join(names)})"
            )
        return names[0] if metric is None else metric

    @part
    def model_facts(self) -> dict[str, ModelFacts]:
        """What the strategy needs to know of the models that the run loads into this process, by their keys."""
        models, algorithm, warmup, media = self.models, self.algorithm, self.run.warmup, self.processor is not None
        reads, facts = algorithm.reads(), dict[str, ModelFacts]()
        used = {POLICY, *(role.key for role in ROLES if role.writes(reads))}
        for key, options in models.items():
            if key not in used:
                continue
            optimizers = {} if options.optimizer is None else {key: options.optimizer.name}
            hooked: tuple[str, ...] = ()
            if key == POLICY:
                hooked = (ROUTER_BALANCE,) if ROUTER_BALANCE in algorithm.policy.outputs else ()
                optimizers |= {} if warmup is None else {"warmup": warmup.optimizer.name}
            facts[key] = ModelFacts(
                head=options.head,
                own_rows=options.head in SCORING,
                lora=options.lora is not None,
                optimizers=optimizers,
                hooked=hooked,
                partly_frozen=bool(options.lora or options.frozen),
                quantized=options.lora is not None and options.lora.quantize is not None,
                media=media,
                liger=options.liger,
            )
        return facts

    @part
    def check_context(self) -> CheckContext:
        prompts, group_size = self.run.batch.prompts, self.run.algorithm.group_size
        return self.context_of(self.source.key, prompts, group_size, self.if_made(lambda: self.algorithm))

    def context_of(self, key: str, prompts: int, group_size: int, algorithm: Algorithm | None) -> CheckContext:
        """The context of `SourceOptions.check`; an unmade part is None."""
        rollout, data = self.if_made(lambda: self.run.rollout), self.if_made(lambda: self.run.data)
        environments, reward = self.if_made(lambda: self.environments), self.if_made(lambda: self.reward)
        train = self.if_made(lambda: self.train)
        cap, cap_key = 1 if rollout is None else rollout.max_new_tokens, "rollout.max_new_tokens"
        if environments is not None:
            cap, cap_key = min((cap, cap_key), (environments.max_tokens, "environment.max_tokens"))
        return CheckContext(
            key=key,
            prompts=prompts,
            group_size=group_size,
            max_new_tokens=cap,
            cap_key=cap_key,
            reads=None if algorithm is None else algorithm.reads(),
            terms=None if reward is None else reward.names,
            streaming=None if data is None else data.streaming,
            mixture=train is not None and is_weighted(train),
            shuffle=data is None or data.shuffle,
        )

    def starts_as_policy(self, role: Role) -> bool:
        """True if the model of a role starts with the weights of the policy: same path or model_config."""
        if not role.follows or role.key not in self.helpers:
            return False
        model, policy = self.helpers[role.key].options, self.actor.options
        return (model.path, model.model_config) == (policy.path, policy.model_config)

    @part
    def warmup_algorithm(self) -> Algorithm | None:
        warmup = self.run.warmup
        return None if warmup is None else build_algorithm(warmup.algorithm(), "warmup")

    @part
    def warmup_source(self) -> Target | None:
        return None if self.run.warmup is None else source_of(self.run.warmup.source, "warmup.source")

    @part
    def warmup_facts(self) -> SourceFacts | None:
        return None if self.warmup_source is None else facts_of(self.warmup_source, None)

    @part
    def algorithms(self) -> dict[str, Algorithm]:
        """Those of the stages, by their keys."""
        warmup = self.warmup_algorithm
        return {"algorithm": self.algorithm} | ({} if warmup is None else {"warmup": warmup})

    @part
    def needs(self) -> set[str]:
        facts, reward, warmup = self.facts, self.reward, self.warmup_facts
        return {*facts.fields, *(reward.fields if facts.scores else ()), *(() if warmup is None else warmup.fields)}
