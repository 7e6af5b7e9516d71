"""Makes the parts that a config names, and runs the checks that need neither data nor a model.

`check_config` reads top to bottom: `make` stores a part by name, `run` calls a check, and both name the parts that they
need. See `rft.errors.Checks`.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from rft.actor.base import ColumnModel
from rft.actor.check import check_adapters, check_options
from rft.actor.init import CLASSIFIERS
from rft.actor.moe import ROUTER_BALANCE
from rft.algorithm.algorithm import Algorithm
from rft.algorithm.check import build_algorithm, check_critic_warmup, check_flow, check_reference
from rft.algorithm.options import AlgorithmOptions
from rft.algorithm.roles import POLICY, REFERENCE, ROLES, Role
from rft.data.base import CheckContext, Source, SourceFacts
from rft.data.rows.mixture import Mixture
from rft.data.rows.stream import check_stream
from rft.errors import Checks, build_each, describe
from rft.logger.log import Sink
from rft.registry import Target, convert, validate
from rft.reward.compose import WeightedSum
from rft.rollout.answerer import Episodes, episodes_of
from rft.setup.constraints import (
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
)
from rft.setup.held_out import GRADERS, held_out_texts, metrics_of_run
from rft.setup.schema import Batch as BatchOptions
from rft.setup.schema import Warmup, root_with_roles
from rft.setup.unread import Parts, check_typed
from rft.strategy.base import ModelFacts, Strategy
from rft.train.schedules import SCHEDULES, Schedule

READERS = tuple(field.name for field in fields(Parts))  # the parts that `check_typed` needs
CONTEXT = ("context",)  # the constructor argument that the run supplies to models, engines and sources


def check_config(config: dict[str, Any], typed: Mapping[str, str]) -> Checks:
    """Makes the parts of a run, and checks each alone and against the others.

    Args:
        config: the resolved config as plain containers.
        typed: where the user typed values, by their keys; see `rft.setup.typed`.

    Returns:
        The messages of all mistakes, and the parts without mistakes. A root key is the part `run.<key>`.
    """
    checks = Checks()
    plugins = config.get("plugins")
    for name in plugins if isinstance(plugins, list) else ():  # `validate` refuses other types
        if isinstance(name, str):
            checks.run(partial(import_plugin, name))
    root = root_with_roles()
    values, messages = validate(config, root, "", "the root of the config")
    checks.messages += messages
    checks.add("root", values)
    for field in fields(root):
        if field.name in values:
            checks.add(f"run.{field.name}", values[field.name])
        else:
            checks.fail(f"run.{field.name}", "root")
    _make_models(checks, {role.key: values.get(role.key) for role in ROLES if config.get(role.key) is not None})
    _make_parts(checks)
    _check_numbers(checks)
    _check_train(checks)
    if values.get("warmup") is not None:
        _check_warmup(checks)
    elif "warmup" in values:
        for name in ("warmup_algorithm", "warmup_source", "warmup_facts"):
            checks.add(name, None)
    else:
        checks.fail("warmup_algorithm", "warmup_source", "warmup_facts")
    checks.make("stages", _algorithms, "algorithm", "warmup_algorithm")
    checks.run(check_environments, "environments", "facts", "reward", "algorithm", "processor", "run.mode")
    checks.run(check_head, "actor", "engine", "stages", "facts", "generates")
    checks.run(check_media, "processor", "engine", "facts", "generates")
    checks.make("needs", _fields_needed, "facts", "reward", "warmup_facts")
    checks.run(_check_sinks, "sinks")
    checks.run(lambda *parts: check_typed(typed, Parts(*parts)), *READERS)
    if not checks.messages:
        checks.add("run", root(**values))
    return checks


def _make_models(checks: Checks, nodes: dict[str, Any]) -> None:
    """Makes `tokenizer`, `processor`, `actor`, `helpers` (the models beside the policy, by role), and `models` (the
    options of those with weights). Other models inherit options of the policy; a mistake in an inherited option is
    reported once.

    Args:
        nodes: the yaml node of each role in the config; None for a node that is not a mapping.
    """
    checks.make("tokenizer", lambda actor: Target(actor.pop("tokenizer", None), "actor.tokenizer"), "run.actor")
    checks.make("processor", processor_of, "run.actor")
    precompute = (nodes.get(REFERENCE.key) or {}).pop("precompute", False)
    checks.make("precompute", lambda: convert(precompute, bool, "reference.precompute"))
    reported = set[str]()
    keys = list(nodes)
    checks.fail(POLICY, *keys)
    if checks.has("run.actor"):
        nodes = {POLICY: checks.parts["run.actor"], **nodes}
    for key, node in nodes.items():
        if node is None:
            continue
        own = Checks()
        own.make(key, partial(actor_of, node, key))
        own.run(lambda model, key=key: check_options(model.options, key) if model.factory.has_weights else (), key)
        checks.messages += [text for text in own.messages if text.removeprefix(key) not in reported]
        reported |= {text.removeprefix(key) for text in own.messages}
        if own.has(key):
            checks.add(key, own.parts[key])
    checks.make("helpers", lambda *models: dict(zip(keys, models, strict=True)), *keys)
    checks.make("models", models_with_weights, "actor", "helpers")
    checks.run(check_adapters, "models")


def _make_parts(checks: Checks) -> None:
    checks.make("strategy", strategy_of, "run.strategy")
    checks.make("engine", lambda rollout: Target(rollout.engine, "rollout.engine", CONTEXT), "run.rollout")
    checks.run(check_engine, "run.rollout", "engine", "actor", "processor", "strategy")
    checks.make("environments", episodes_of, "run.environment")
    checks.make("source", lambda options: source_of(options.source, "algorithm.source"), "run.algorithm")
    checks.make("facts", facts_of, "source", "environments")
    checks.make("train", lambda data: Target(data.train, "data.train", ("key",)), "run.data")
    checks.make("held_out", lambda data: build_each(_held_out_rows, data.held_out()), "run.data")
    checks.make("reward", lambda node: Target(node, "reward").build(), "run.reward")
    checks.make("sinks", lambda nodes: build_each(_sink, nodes), "run.logger")
    checks.make(
        "algorithm",
        lambda options, reward: build_algorithm(options, "algorithm", reward.weights),
        "run.algorithm",
        "reward",
    )
    checks.make("schedules", lambda options: build_each(_schedule, options.schedules), "run.algorithm")
    checks.make("grader", lambda actor: GRADERS.get(actor.options["head"]), "actor")
    checks.make("given", held_out_texts, "run.eval", "source", "facts")
    checks.make(
        "generates",
        lambda data, grader, given: bool(data.held_out()) and grader is None and given is None,
        "run.data",
        "grader",
        "given",
    )


def _check_numbers(checks: Checks) -> None:
    checks.run(check_name, "run.name")
    checks.run(check_folders, "run.output_dir", "run.cache")
    checks.run(check_time, "run.max_time")
    checks.run(check_batch, "run.batch", "run.algorithm")
    checks.run(check_eval, "run.eval")
    checks.run(check_vote, "run.eval", "reward")
    checks.run(check_eval_sampling, "run.rollout", "run.eval", "engine")
    checks.run(check_epochs, "run.steps", "run.epochs", "run.data")
    if checks.parts.get("run.steps") is not None:
        check_steps(checks)
    checks.make("metrics", metrics_of_run, "run.data", "run.eval", "reward", "grader", "given", "algorithm")
    checks.make("metric", choose_metric, "run.metric", "metrics")
    checks.run(check_stop, "run.warmup", "metric")


def check_steps(checks: Checks) -> None:
    """Checks what depends on the number of steps. With `epochs` it is known when the rows are counted."""
    checks.run(check_profile, "run.profile", "run.steps", "run.warmup")
    checks.make("critic_warmup", check_critic_warmup, "run.algorithm", "run.steps")
    checks.run(_check_schedules, "schedules", "algorithm", "run.steps", "critic_warmup")


def _check_train(checks: Checks) -> None:
    checks.make("model_facts", model_facts, "models", "algorithm", "run.warmup", "processor")
    checks.run(lambda strategy, facts: strategy.factory.check(strategy.options, facts), "strategy", "model_facts")
    checks.make("context", partial(_train_context, checks), "source", "run.batch", "run.algorithm")
    checks.run(lambda source, context: source.factory.check(source.options, context), "source", "context")
    checks.run(check_mixtures, "held_out")
    checks.run(lambda data, train: check_stream(data.streaming, train), "run.data", "train")
    checks.run(lambda made, facts: check_flow(made, facts.writes, facts.writes_if_read), "algorithm", "facts")
    checks.run(_check_roles, "algorithm", "helpers")
    checks.make("copied", lambda actor, helpers: starts_as_policy(REFERENCE, actor, helpers), "actor", "helpers")
    checks.make("sampled", lambda facts: facts.sampled != "never", "facts")
    checks.run(check_reference, "algorithm", "sampled", "precompute", "copied")


def _check_warmup(checks: Checks) -> None:
    checks.make("warmup_algorithm", lambda warmup: build_algorithm(warmup.algorithm(), "warmup"), "run.warmup")
    checks.make("warmup_source", lambda warmup: source_of(warmup.source, "warmup.source"), "run.warmup")
    checks.make("warmup_facts", lambda source: facts_of(source, None), "warmup_source")
    checks.make("warmup_context", partial(_warmup_context, checks), "warmup_source", "run.warmup")
    checks.run(lambda source, context: source.factory.check(source.options, context), "warmup_source", "warmup_context")
    checks.run(
        lambda made, facts: check_flow(made, facts.writes, facts.writes_if_read), "warmup_algorithm", "warmup_facts"
    )


def _held_out_rows(name: str, node: Any) -> Target:
    return Target(node, f"data.eval.{name}", ("key",))


def _sink(name: str, node: Any) -> Sink:
    sink: Sink = Target(node, f"logger.{name}").build()
    return sink


def _check_sinks(sinks: Mapping[str, Sink]) -> None:
    """Raises Problems if packages of loggers are not installed."""
    build_each(lambda _, sink: sink.check(), sinks)


def _schedule(name: str, node: Any) -> Schedule:
    schedule: Schedule = SCHEDULES.build(node, f"algorithm.schedules.{name}")()
    return schedule


def _check_schedules(schedules: dict[str, Schedule], algorithm: Algorithm, steps: int, _: None) -> None:
    """Checks the schedules; `algorithm.critic_warmup`, which sets one of them, is checked before."""
    reads = algorithm.reads()
    models = [role.key for role in ROLES if role.writes(reads)]

    def check(name: str, schedule: Schedule) -> None:
        schedule.check(f"algorithm.schedules.{name}", steps, models, algorithm.learners)

    build_each(check, schedules)


def _train_context(checks: Checks, source: Target, batch: BatchOptions, options: AlgorithmOptions) -> CheckContext:
    return _context(checks, source.key, batch.prompts, options.group_size, "algorithm")


def _warmup_context(checks: Checks, source: Target, warmup: Warmup) -> CheckContext:
    return _context(checks, source.key, warmup.rows, 1, "warmup_algorithm")


def _context(checks: Checks, key: str, prompts: int, group_size: int, algorithm: str) -> CheckContext:
    """The context of `Source.check`; a part that is in error is None."""
    rollout, data = (checks.parts[f"run.{name}"] if checks.has(f"run.{name}") else None for name in ("rollout", "data"))
    cap, cap_key = 1 if rollout is None else rollout.max_new_tokens, "rollout.max_new_tokens"
    if checks.has("environments") and (environments := checks.parts["environments"]) is not None:
        cap, cap_key = min((cap, cap_key), (environments.max_tokens, "environment.max_tokens"))
    return CheckContext(
        key=key,
        prompts=prompts,
        group_size=group_size,
        max_new_tokens=cap,
        cap_key=cap_key,
        reads=checks.parts[algorithm].reads() if checks.has(algorithm) else None,
        terms=checks.parts["reward"].names if checks.has("reward") else None,
        streaming=None if data is None else data.streaming,
        mixture=checks.has("train") and checks.parts["train"].factory is Mixture,
        shuffle=data is None or data.shuffle,
    )


def _algorithms(train: Algorithm, warmup: Algorithm | None) -> dict[str, Algorithm]:
    return {"algorithm": train} | ({} if warmup is None else {"warmup": warmup})


def _check_roles(algorithm: Algorithm, helpers: Mapping[str, Target]) -> list[str]:
    """A message for every model that the config lacks although its columns are read."""
    reads = algorithm.reads()
    missing = {role.key: role.writes(reads) for role in ROLES if role.key not in helpers and role.writes(reads)}
    return [
        f"{key} is missing: the algorithm reads {', '.join(columns)}; add `{key}: {{_target_: <class>, options}}`, the "
        "model that writes it"
        for key, columns in missing.items()
    ]


def _fields_needed(facts: SourceFacts, reward: WeightedSum, warmup: SourceFacts | None) -> set[str]:
    """The fields that every training row must have."""
    return {*facts.fields, *(reward.fields if facts.scores else ()), *(() if warmup is None else warmup.fields)}


def starts_as_policy(role: Role, actor: Target, helpers: Mapping[str, Target]) -> bool:
    """True if the model of a role starts with the weights of the policy: both name the same path or model_config."""
    if not role.follows or role.key not in helpers:
        return False
    own, policy = helpers[role.key].options, actor.options
    return all(own[name] == policy[name] for name in ("path", "model_config"))


def models_with_weights(actor: Target, helpers: Mapping[str, Target]) -> dict[str, dict[str, Any]]:
    """The options of the models whose weights are in this process, by their keys."""
    return {target.key: target.options for target in (actor, *helpers.values()) if target.factory.has_weights}


def model_facts(
    models: Mapping[str, dict[str, Any]], algorithm: Algorithm, warmup: Warmup | None, processor: Target | None
) -> dict[str, ModelFacts]:
    """What the strategy needs to know of the models that the run loads into this process, by their keys."""
    facts, used = {}, {POLICY, *(role.key for role in ROLES if role.writes(algorithm.reads()))}
    for key, options in models.items():
        if key not in used:
            continue
        optimizers = {key: options["optimizer"].name} if options["optimizer"] is not None else {}
        hooked: tuple[str, ...] = ()
        if key == POLICY:
            hooked = (ROUTER_BALANCE,) if ROUTER_BALANCE in algorithm.policy.outputs else ()
            optimizers |= {} if warmup is None else {"warmup": warmup.optimizer.name}
        head = options["head"]
        lora, partly_frozen = options["lora"], bool(options["lora"] or options["frozen"])
        quantized = lora is not None and lora.quantize is not None
        own_rows = head in CLASSIFIERS
        parts = (lora is not None, optimizers, hooked, partly_frozen, quantized)
        facts[key] = ModelFacts(head, own_rows, *parts, processor is not None, options["liger"])
    return facts


def class_of(node: Any, key: str, kind: type, noun: str, supplied: tuple[str, ...] = CONTEXT) -> Target:
    """A class named by `_target_` that implements an abstract class.

    Args:
        kind: the abstract class.
        noun: what messages call an instance of it.
        supplied: constructor parameters that the run supplies; they are not yaml options.

    Raises:
        ValueError: names the key.
    """
    target = Target(node, key, supplied)
    if not (isinstance(target.factory, type) and issubclass(target.factory, kind)):
        raise ValueError(
            f"{key}._target_: {target.factory.__name__} is no {noun}; name a class that implements "
            f"{kind.__module__}.{kind.__name__}"
        )
    return target


def source_of(node: Any, key: str) -> Target:
    """The class of a source of batches, with its options. Raises as `class_of`."""
    return class_of(node, key, Source, "source of batches")


def facts_of(source: Target, environments: Episodes | None) -> SourceFacts:
    """The facts that a source states about itself, with the options of its yaml and the environments of the run."""
    facts: SourceFacts = source.factory.facts(source.options)
    return facts if environments is None else facts.with_episodes(environments.columns_if_read)


def actor_of(node: Any, key: str) -> Target:
    """The class of a model, with its options.

    Raises:
        ValueError: names the key; also for a remote model in a role that trains or starts as the policy.
    """
    target = class_of(node, key, ColumnModel, "model")
    remote = [role.key for role in ROLES if role.loss is None and not role.follows]
    if key not in remote and not target.factory.has_weights:
        name = target.factory.__name__
        raise ValueError(f"{key}._target_: {name} is a remote model, which only {' or '.join(remote)} may be")
    return target


def processor_of(actor: dict[str, Any]) -> Target | None:
    """The function that makes the processor of the policy, with its options; None for a model of text."""
    node = actor.pop("processor", None)
    return None if node is None else Target(node, "actor.processor", ("tokenizer",))


def strategy_of(node: Any) -> Target:
    """The class of the strategy, with its options. Raises as `class_of`."""
    return class_of(node, "strategy", Strategy, "strategy", ("world",))


def import_plugin(name: str) -> None:
    """Imports a module of the user, which registers its functions.

    Raises:
        ValueError: the module is not on the path, or an error is raised in it.
    """
    try:
        importlib.import_module(name)
    except (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError, LookupError) as error:
        if not name or (isinstance(error, ModuleNotFoundError) and error.name == name):
            raise ValueError(
                f"plugins: no module {name!r} is found; it is looked for beside the recipe (-cd <folder>) and on "
                "PYTHONPATH"
            ) from error
        spec = importlib.util.find_spec(name)
        file = "" if spec is None else spec.origin or ""
        raise ValueError(f"plugins: the module {name!r} cannot be imported: {describe(error, file)}") from error
