"""The parts that a config names, and the checks that need neither data nor a model.

`Parts` reads top to bottom: each part is an attribute made of those above it. See `rft.errors.Checked`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from rft.actor.forward.backbone import ROUTER_BALANCE
from rft.actor.init import CLASSIFIERS
from rft.actor.options import ActorOptions, check_adapters
from rft.algorithm.algorithm import Algorithm
from rft.algorithm.check import build_algorithm, check_critic_warmup, check_flow, check_reference
from rft.algorithm.roles import POLICY, REFERENCE, ROLES, Role
from rft.data.base import CheckContext, GivenTexts, SourceFacts
from rft.data.rows.mixture import Mixture
from rft.data.rows.stream import check_stream
from rft.errors import Check, Checked, Checks, Unmade, build_each, checks, part
from rft.evaluation.preference import ScoreEvaluator
from rft.imports import import_plugin
from rft.logger.log import Sink
from rft.registry import Target, convert, validate
from rft.reward.compose import WeightedSum
from rft.rollout.answerer import Episodes, episodes_of
from rft.rollout.engine.base import Engine, EngineOptions
from rft.setup.classes import actor_of, class_of, facts_of, processor_of, source_of, strategy_of
from rft.setup.constraints import (
    GRADERS,
    check_batch,
    check_engine,
    check_environments,
    check_epochs,
    check_eval,
    check_eval_sampling,
    check_folders,
    check_head,
    check_media,
    check_mixtures,
    check_name,
    check_profile,
    check_stop,
    check_time,
    check_vote,
    choose_metric,
    held_out_texts,
    metrics_of_run,
)
from rft.setup.schema import Run, Warmup, root_with_roles
from rft.strategy.base import ModelFacts
from rft.train.schedules import SCHEDULES, Schedule


class Parts(Checked):
    """The parts of a run; classes are not built where that takes data or a model.

    Mistakes are reported in the order of the parts and checks below.

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
            own = Checks()
            if (model := own.attempt(actor_of, node, key)) is not None:
                made[key] = model
                own.run(partial(model.options.errors, key))
            self.check.messages += [text for text in own.messages if text.removeprefix(key) not in reported]
            reported |= {text.removeprefix(key) for text in own.messages}
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

    @checks
    def _adapters(self) -> Iterator[Check]:
        yield lambda: check_adapters(self.models)

    @part
    def strategy(self) -> Target:
        return strategy_of(self.run.strategy)

    @part
    def engine(self) -> Target:
        return class_of(self.run.rollout.engine, "rollout.engine", Engine, EngineOptions, "engine")

    @checks
    def _engine(self) -> Iterator[Check]:
        yield lambda: check_engine(self.run.rollout, self.engine, self.actor, self.processor, self.strategy)

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
        return GRADERS.get(self.actor.options.head)

    @part
    def given(self) -> GivenTexts | None:
        return held_out_texts(self.run.eval, self.source, self.facts)

    @part
    def answers(self) -> bool:
        return bool(self.run.data.held_out()) and self.grader is None and self.given is None

    @checks
    def _numbers(self) -> Iterator[Check]:
        run = self.run
        yield lambda: check_name(run.name)
        yield lambda: check_folders(run.output_dir, run.cache)
        yield lambda: check_time(run.max_time)
        yield lambda: check_batch(run.batch, run.algorithm)
        yield lambda: check_eval(run.eval)
        yield lambda: check_vote(run.eval, self.reward)
        yield lambda: check_eval_sampling(run.rollout, run.eval, self.engine)
        yield lambda: check_epochs(run.steps, run.epochs, run.data)
        if self.if_made(lambda: run.steps) is not None:
            yield from self.step_checks()

    def step_checks(self) -> Iterator[Check]:
        """The checks that need the number of steps. With `epochs` it is known when the rows are counted."""
        yield lambda: check_profile(self.run.profile, self.run.step_count(), self.run.warmup)
        yield self._check_schedules

    def _check_schedules(self) -> None:
        """Checks the schedules after `algorithm.critic_warmup`, which sets one of them."""
        steps = self.run.step_count()
        check_critic_warmup(self.run.algorithm, steps)
        schedules, algorithm = self.schedules, self.algorithm
        reads = algorithm.reads()
        models = [role.key for role in ROLES if role.writes(reads)]

        def check(name: str, schedule: Schedule) -> None:
            schedule.check(f"algorithm.schedules.{name}", steps, models, algorithm.learners)

        build_each(check, schedules)

    @part
    def metrics(self) -> list[str]:
        return metrics_of_run(self.run.data, self.run.eval, self.reward, self.grader, self.given, self.algorithm)

    @part
    def metric(self) -> str:
        return choose_metric(self.run.metric, self.metrics)

    @checks
    def _stop(self) -> Iterator[Check]:
        yield lambda: check_stop(self.run.warmup, self.metric)

    @part
    def model_facts(self) -> dict[str, ModelFacts]:
        return model_facts(self.models, self.algorithm, self.run.warmup, self.processor)

    @checks
    def _strategy(self) -> Iterator[Check]:
        yield lambda: self.strategy.options.check(self.model_facts)

    @part
    def check_context(self) -> CheckContext:
        prompts, group_size = self.run.batch.prompts, self.run.algorithm.group_size
        return self._context(self.source.key, prompts, group_size, self.if_made(lambda: self.algorithm))

    def _context(self, key: str, prompts: int, group_size: int, algorithm: Algorithm | None) -> CheckContext:
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
            mixture=train is not None and train.factory is Mixture,
            shuffle=data is None or data.shuffle,
        )

    @checks
    def _training(self) -> Iterator[Check]:
        yield lambda: self.source.options.check(self.check_context)
        yield lambda: check_mixtures(self.held_out)
        yield lambda: check_stream(self.run.data.streaming, self.train)
        yield lambda: check_flow(self.algorithm, self.facts.writes, self.facts.writes_if_read)
        yield lambda: _check_roles(self.algorithm, self.helpers)
        yield lambda: check_reference(
            self.algorithm, self.facts.sampled != "never", self.precompute, self.starts_as_policy(REFERENCE)
        )

    def starts_as_policy(self, role: Role) -> bool:
        """True if the model of a role starts with the weights of the policy: same path or model_config."""
        if not role.follows or role.key not in self.helpers:
            return False
        own, policy = self.helpers[role.key].options, self.actor.options
        return (own.path, own.model_config) == (policy.path, policy.model_config)

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

    @checks
    def _warmup(self) -> Iterator[Check]:
        yield self._check_warmup_source
        yield self._check_warmup_flow

    def _check_warmup_source(self) -> None:
        source, warmup = self.warmup_source, self.run.warmup
        if source is not None and warmup is not None:
            algorithm = self.if_made(lambda: self.warmup_algorithm)
            source.options.check(self._context(source.key, warmup.rows, 1, algorithm))

    def _check_warmup_flow(self) -> None:
        algorithm, facts = self.warmup_algorithm, self.warmup_facts
        if algorithm is not None and facts is not None:
            check_flow(algorithm, facts.writes, facts.writes_if_read)

    @part
    def algorithms(self) -> dict[str, Algorithm]:
        """Those of the stages, by their keys."""
        warmup = self.warmup_algorithm
        return {"algorithm": self.algorithm} | ({} if warmup is None else {"warmup": warmup})

    @checks
    def _answers(self) -> Iterator[Check]:
        yield lambda: check_environments(
            self.environments, self.facts, self.reward, self.algorithm, self.processor, self.run.mode
        )
        yield lambda: check_head(self.actor, self.engine, self.algorithms, self.facts, self.answers)
        yield lambda: check_media(self.processor, self.engine, self.facts, self.answers)

    @part
    def needs(self) -> set[str]:
        facts, reward, warmup = self.facts, self.reward, self.warmup_facts
        return {*facts.fields, *(reward.fields if facts.scores else ()), *(() if warmup is None else warmup.fields)}

    @checks
    def _packages(self) -> Iterator[Check]:
        for sink in self.if_made(lambda: self.sinks) or ():
            yield sink.check


def _check_roles(algorithm: Algorithm, helpers: Mapping[str, Target]) -> list[str]:
    """A message for every model that the config lacks although its columns are read."""
    reads = algorithm.reads()
    missing = {role.key: role.writes(reads) for role in ROLES if role.key not in helpers and role.writes(reads)}
    return [
        f"{key} is missing: the algorithm reads {', '.join(columns)}; add `{key}: {{_target_: <class>, options}}`, the "
        "model that writes it"
        for key, columns in missing.items()
    ]


def model_facts(
    models: Mapping[str, ActorOptions], algorithm: Algorithm, warmup: Warmup | None, processor: Target | None
) -> dict[str, ModelFacts]:
    """What the strategy needs to know of the models that the run loads into this process, by their keys."""
    facts, used = {}, {POLICY, *(role.key for role in ROLES if role.writes(algorithm.reads()))}
    for key, options in models.items():
        if key not in used:
            continue
        optimizers = {} if options.optimizer is None else {key: options.optimizer.name}
        hooked: tuple[str, ...] = ()
        if key == POLICY:
            hooked = (ROUTER_BALANCE,) if ROUTER_BALANCE in algorithm.policy.outputs else ()
            optimizers |= {} if warmup is None else {"warmup": warmup.optimizer.name}
        lora = options.lora
        facts[key] = ModelFacts(
            head=options.head,
            own_rows=options.head in CLASSIFIERS,
            lora=lora is not None,
            optimizers=optimizers,
            hooked=hooked,
            partly_frozen=bool(lora or options.frozen),
            quantized=lora is not None and lora.quantize is not None,
            media=processor is not None,
            liger=options.liger,
        )
    return facts
