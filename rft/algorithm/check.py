"""Checks of the combination of functions that a yaml names. Every error names the yaml key and the cure."""

from collections.abc import Container, Iterator, Mapping, Sequence

from rft.algorithm.algorithm import Algorithm
from rft.algorithm.options import AlgorithmOptions
from rft.algorithm.roles import ROLES
from rft.batch.columns import check_columns
from rft.errors import Checks, did_you_mean

UNITS = ("token", "sequence", "pair", "group")
POLICY_HEADS = ("lm", "score", "step")


def build_algorithm(options: AlgorithmOptions, key: str, term_weights: Mapping[str, float] | None = None) -> Algorithm:
    """Builds an algorithm and refuses options that would be ignored or counted twice.

    Args:
        options: its yaml.
        key: its place in the yaml ("algorithm").
        term_weights: the weight of every reward term.

    Raises:
        ValueError: names the key of every option that does not fit.
    """
    algorithm, check = Algorithm(options, key, term_weights), Checks()
    for look in (
        _heads,
        _units,
        _scores,
        _ties,
        _pick,
        _iteration,
        _reward_terms,
        _correction,
        _critic_warmup,
        _group_baseline,
    ):
        check.attempt(look, algorithm, key)
    check.end()
    return algorithm


def _critic_warmup(algorithm: Algorithm, key: str) -> None:
    if algorithm.options.critic_warmup and "critic" not in algorithm.learners:
        raise ValueError(
            f"{key}.critic_warmup={algorithm.options.critic_warmup}: there is no critic to train alone; set it to 0 or "
            "choose an algorithm/critic_loss"
        )


def _group_baseline(algorithm: Algorithm, key: str) -> None:
    advantage, size = algorithm.advantage, algorithm.options.group_size
    if advantage is not None and advantage.facts.group_baseline and size == 1:
        raise ValueError(
            f"{key}.group_size={size}: the advantage {advantage.name!r} compares the rows of a group and is 0 for a "
            f"group of one; set {key}.group_size to 2 or more, or choose another algorithm/advantage"
        )


def _heads(algorithm: Algorithm, key: str) -> None:
    loss, *terms = (term.plugin for term in algorithm.policy.terms)
    if loss.facts.head not in POLICY_HEADS:
        raise ValueError(f"{key}.loss: {loss.name!r} is a loss of the critic, not of the policy")
    for term in terms:
        if term.facts.head != loss.facts.head:
            raise ValueError(
                f"{key}.terms: {term.name!r} trains the head {term.facts.head!r}, but {loss.name!r} the head "
                f"{loss.facts.head!r}; take it out"
            )
    for role in ROLES:
        if (
            role.key in algorithm.learners
            and (plugin := algorithm.learners[role.key].terms[0].plugin).facts.head != role.head
        ):
            raise ValueError(f"{key}.{role.loss}: {plugin.name!r} is not a loss of the {role.key}, a {role.head} model")


def _units(algorithm: Algorithm, key: str) -> None:
    plugins = [term.plugin for term in algorithm.policy.terms]
    for plugin in plugins:
        if plugin.facts.unit not in UNITS:
            raise ValueError(
                f"{key}.loss: {plugin.name!r} states unit={plugin.facts.unit!r}; register it with "
                f"one of those that are weighed: {', '.join(UNITS)}"
            )
    learners = [objective.terms[0].plugin for objective in algorithm.learners.values()]
    per_token = [plugin.name for plugin in (*plugins, *learners) if plugin.facts.unit == "token"]
    if per_token and algorithm.aggregation is None:
        raise ValueError(f"{key}.aggregation is null, but {per_token[0]!r} needs the weight of a token; choose one")
    if not per_token and algorithm.aggregation is not None:
        raise ValueError(
            f"{key}.aggregation={algorithm.aggregation.name} weighs tokens, but {plugins[0].name!r} has a value per "
            f"{plugins[0].facts.unit}; choose algorithm/aggregation=none"
        )


def _scores(algorithm: Algorithm, key: str) -> None:
    for part in ("shaping", "reward_kl", "turn_rewards"):
        given = vars(algorithm.options)[part]
        if given and algorithm.advantage is None:
            raise ValueError(f"{key}.{part} changes scores, which only {key}.advantage reads; take it out")
        if given and algorithm.advantage is not None and algorithm.advantage.facts.raw:
            raise ValueError(
                f"{key}.{part} changes scores, but the advantage {algorithm.advantage.name!r} is a formula of the raw "
                "scores; take it out or choose another advantage"
            )
    if algorithm.options.advantage_clip is not None and algorithm.advantage is None:
        raise ValueError(f"{key}.advantage_clip limits advantages, and {key}.advantage=none; set it to null")


def _ties(algorithm: Algorithm, key: str) -> None:
    if not algorithm.options.mask_tied:
        return
    if algorithm.advantage is None and not algorithm.selection.facts.groups:
        raise ValueError(
            f"{key}.mask_tied compares scores, which nothing reads without {key}.advantage; set it to false"
        )
    if algorithm.options.group_size < 2:
        raise ValueError(
            f"{key}.mask_tied: a group of one is always tied, so nothing would train; set it to false or "
            f"{key}.group_size to 2 or more"
        )


def _pick(algorithm: Algorithm, key: str) -> None:
    pick, facts, loss = algorithm.selection.name, algorithm.selection.facts, algorithm.policy.terms[0].plugin
    if facts.groups and algorithm.options.group_size < 2:
        raise ValueError(f"{key}.pick={pick}: set {key}.group_size to 2 or more, so that there is a choice")
    if facts.pairs and loss.facts.unit not in ("pair", "sequence"):
        raise ValueError(
            f"{key}.pick={pick} makes pairs, but {loss.name!r} has a value per {loss.facts.unit}; choose a loss of "
            f"pairs, such as algorithm/loss=dpo, or {key}.pick=best"
        )
    if facts.resamples and algorithm.advantage is None:
        raise ValueError(
            f"{key}.pick={pick}: rows are drawn by |score|^power, which needs an {key}.advantage and a source that "
            f"samples; set {key}.pick=all"
        )
    if facts.resamples and loss.facts.unit not in ("token", "sequence"):
        raise ValueError(
            f"{key}.pick={pick} draws single rows, but {loss.name!r} needs whole {loss.facts.unit}s; set {key}.pick=all"
        )


def _iteration(algorithm: Algorithm, key: str) -> None:
    iteration, sampler = algorithm.options.iteration, algorithm.options.sampler
    asked = {"iteration": iteration} if iteration else {"sampler": sampler} if sampler == "reference" else {}
    if asked and "ref_logprobs" not in algorithm.reads():
        [(name, value)] = asked.items()
        raise ValueError(
            f"{key}.{name}={value}: nothing reads ref_logprobs, so there is no reference; set {key}.iteration=0 and "
            f"{key}.sampler=actor, or choose a loss or a term that reads it, such as algorithm/terms=[kl]"
        )


def _reward_terms(algorithm: Algorithm, key: str) -> None:
    terms = algorithm.term_weights or {}
    places = {f"{key}.terms.{term.name}": term.plugin for term in algorithm.policy.terms[1:]}
    places |= {f"{key}.{role}_loss": objective.terms[0].plugin for role, objective in algorithm.learners.items()}
    places |= {f"{key}.shaping.{name}": plugin for name, plugin in algorithm.shaping.items()}
    for place, plugin in places.items():
        if "term" in plugin.options and (name := plugin.options["term"]) not in terms:
            raise ValueError(
                f"{place}.term={name}: none of reward.terms, which are {', '.join(terms)}{did_you_mean(name, terms)}"
            )


def _correction(algorithm: Algorithm, key: str) -> None:
    if algorithm.correction is not None:
        copied = algorithm.options.old_logprobs == "rollout"
        algorithm.correction.check(algorithm.policy.terms[0].plugin, copied, key)


def corrects_for_age(algorithm: Algorithm) -> bool:
    """Whether anything weighs tokens by the probability with which the engine sampled them."""
    reads = algorithm.reads()
    return "rollout_logprobs" in reads or (algorithm.options.old_logprobs == "rollout" and "old_logprobs" in reads)


def check_critic_warmup(options: AlgorithmOptions, steps: int) -> None:
    """Checks that the policy trains in at least one of the steps of the run.

    Raises:
        ValueError: it trains in none.
    """
    if options.critic_warmup >= steps > 0:
        raise ValueError(
            f"algorithm.critic_warmup={options.critic_warmup}: the policy would train in none of the steps={steps}; "
            "raise steps or lower algorithm.critic_warmup"
        )


def check_flow(algorithm: Algorithm, writes: Sequence[str], writes_if_read: Sequence[str]) -> None:
    """Checks that every column that a step reads has one writer before it.

    Args:
        writes: the columns that the source of the batches always writes.
        writes_if_read: those that it writes only if something reads them.

    Raises:
        ValueError: names the column and the parts that read or write it.
    """
    reads = algorithm.reads()
    copied = algorithm.options.old_logprobs == "rollout"
    if "trajectory" in writes and algorithm.selection.facts.resamples:
        raise ValueError(
            f"algorithm.pick={algorithm.selection.name} draws single rows, but a trajectory of algorithm.source may "
            "have several; set algorithm.pick=all"
        )
    if "trajectory" in writes and "turn" not in writes:
        raise ValueError("algorithm.source writes trajectory, whose rows are ordered by turn; let it write turn, too")
    stages: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        ("algorithm.source", (), (*writes, *(name for name in writes_if_read if name in reads))),
        ("algorithm.mask_truncated", ("response_mask", "truncated"), ("loss_mask",)),
    ]
    if algorithm.selection.facts.groups:
        stages.append(("algorithm.pick", ("scores", "group", "unit"), algorithm.selection.facts.writes))
    if "old_logprobs" in reads:
        stages.append(
            ("algorithm.old_logprobs", ("rollout_logprobs" if copied else "tokens",), ("old_logprobs",)),
        )
    if "sum_p_squared" in reads:
        stages.append(("actor", ("tokens",), ("sum_p_squared",)))
    for role in ROLES:
        if role.key in algorithm.learners and not role.writes(reads):
            raise ValueError(
                f"algorithm.{role.loss} trains the {role.key}, but nothing reads its {', '.join(role.columns)}; choose "
                f"an algorithm/advantage that does or algorithm/{role.loss}=none"
            )
        if columns := role.writes(reads):
            if role.loss is not None and role.key not in algorithm.learners:
                raise ValueError(
                    f"something reads {', '.join(columns)}, but algorithm.{role.loss} is null, so nothing would train "
                    f"the {role.key}; choose an option of algorithm/{role.loss}"
                )
            stages.append((role.key, ("tokens",), tuple(columns)))
    check_columns([*stages, *algorithm.stages()])


def check_roles(algorithm: Algorithm, models: Container[str]) -> Iterator[str]:
    """Checks that the config has every model whose columns are read.

    Args:
        models: the keys of those beside the policy.
    """
    reads = algorithm.reads()
    for role in ROLES:
        if role.key not in models and (columns := role.writes(reads)):
            yield (
                f"{role.key} is missing: the algorithm reads {', '.join(columns)}; add `{role.key}: {{_target_: "
                "<class>, options}`, the model that writes it"
            )


def check_reference(algorithm: Algorithm, sampled: bool, precompute: bool, copied: bool) -> Iterator[str]:
    """Checks a reference that moves, samples, or is computed before training.

    Args:
        sampled: whether batches are sampled, at least some of them.
        precompute: the option of the reference.
        copied: the reference starts as a copy of the policy.

    Yields:
        A message for every mistake.
    """
    iteration, sampler = algorithm.options.iteration, algorithm.options.sampler
    moves, samples = iteration > 0, sampler == "reference"
    if samples and not sampled:
        yield "algorithm.sampler=reference: algorithm.source samples nothing; set algorithm.sampler=actor"
    if (moves or samples) and not copied:
        yield (
            f"algorithm.iteration={iteration}, algorithm.sampler={sampler}: the reference must be a copy of the "
            "policy, but reference names another model than actor; leave reference.path and reference.model_config as "
            "they are, or set algorithm.iteration=0 and algorithm.sampler=actor"
        )
    reasons = {
        "nothing reads ref_logprobs": "ref_logprobs" not in algorithm.reads(),
        "algorithm.source samples, so no row comes again": sampled,
        f"algorithm.iteration={iteration} moves it": moves,
    }
    if precompute and (obstacles := [reason for reason, holds in reasons.items() if holds]):
        yield f"reference.precompute=true: {obstacles[0]}; set reference.precompute=false"
