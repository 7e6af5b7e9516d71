"""Combinations of functions that make no sense together. Every refusal names the yaml key and the cure."""

from collections.abc import Mapping

from rft.algorithm.algorithm import Algorithm
from rft.algorithm.options import AlgorithmOptions
from rft.algorithm.roles import ROLES
from rft.errors import Checks
from rft.registry import did_you_mean

UNITS = ("token", "sequence", "pair", "group")
POLICY_HEADS = ("lm", "score", "step")


def build_algorithm(options: AlgorithmOptions, key: str, term_weights: Mapping[str, float] | None = None) -> Algorithm:
    """An algorithm whose functions make sense together.

    Args:
        options: its yaml.
        key: its place in the yaml ("algorithm").
        term_weights: the weight of every reward term.

    Raises:
        ValueError: names the key of every option that does not fit.
    """
    algorithm = Algorithm(options, key, term_weights)
    check_algorithm(algorithm, key)
    return algorithm


def check_algorithm(algorithm: Algorithm, key: str) -> None:
    """Refuses what would be accepted and then ignored, or counted twice.

    Raises:
        Problems: each names the key and the cure.
    """
    check = Checks()
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
    ):
        with check():
            look(algorithm, key)
    check.end()


def _critic_warmup(algorithm: Algorithm, key: str) -> None:
    if algorithm.options.critic_warmup < 0:
        raise ValueError(f"{key}.critic_warmup={algorithm.options.critic_warmup}: set it to 0 or more")
    if algorithm.options.critic_warmup and "critic" not in algorithm.learners:
        raise ValueError(
            f"{key}.critic_warmup={algorithm.options.critic_warmup}: there is no critic to train alone; set it to 0 or "
            "choose an algorithm/critic_loss"
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
    for part, given in (("shaping", algorithm.shaping), ("reward_kl", algorithm.reward_kl)):
        if given and algorithm.advantage is None:
            raise ValueError(f"{key}.{part} changes scores, which only {key}.advantage reads; take it out")
        if given and algorithm.advantage is not None and algorithm.advantage.facts.raw:
            raise ValueError(
                f"{key}.{part} changes scores, but the advantage {algorithm.advantage.name!r} is a formula of the raw "
                "scores; take it out or choose another advantage"
            )


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
    if iteration < 0:
        raise ValueError(f"{key}.iteration={iteration}: set it to 0, or to the steps after which the reference moves")
    asked = {"iteration": iteration} if iteration else {"sampler": sampler} if sampler == "reference" else {}
    if asked and "ref_logprobs" not in algorithm.reads():
        [(name, value)] = asked.items()
        raise ValueError(
            f"{key}.{name}={value}: nothing reads ref_logprobs, so there is no reference; set {key}.iteration=0 and "
            f"{key}.sampler=actor, or choose a loss or a term that reads it, such as algorithm/terms=[kl]"
        )


def _reward_terms(algorithm: Algorithm, key: str) -> None:
    known = algorithm.term_weights or {}
    places = {f"{key}.terms.{term.name}": term.plugin for term in algorithm.policy.terms[1:]}
    places |= {f"{key}.{role}_loss": objective.terms[0].plugin for role, objective in algorithm.learners.items()}
    for place, plugin in places.items():
        if "term" in plugin.options and (name := plugin.options["term"]) not in known:
            raise ValueError(
                f"{place}.term={name}: none of reward.terms, which are {', '.join(known)}{did_you_mean(name, known)}"
            )


def _correction(algorithm: Algorithm, key: str) -> None:
    correction, loss = algorithm.correction, algorithm.policy.terms[0].plugin
    if correction is None:
        return
    if loss.facts.unit == "pair":
        raise ValueError(
            f"{key}.correction may reject one row of a pair, which {loss.name!r} needs whole; set it to null"
        )
    copied = algorithm.options.old_logprobs == "rollout"
    if correction.anchor == "old" and copied:
        raise ValueError(
            f"{key}.correction.anchor=old compares old with rollout log-probabilities, but {key}.old_logprobs=rollout "
            f"makes them the same; set {key}.old_logprobs=actor or {key}.correction.anchor=rollout"
        )
    if correction.weighs and loss.facts.unit != "token":
        raise ValueError(
            f"{key}.correction gives every token a weight, but {loss.name!r} has a value per {loss.facts.unit}; "
            "choose a correction that rejects (such as geo_rs) or a loss per token"
        )
    ratios = {"rollout_logprobs", "old_logprobs"} if correction.anchor == "rollout" else {"rollout_logprobs"}
    if correction.by_ratio and ratios & set(loss.facts.reads):
        raise ValueError(
            f"{key}.correction weighs with a ratio to the rollout policy, and {loss.name!r} does so itself: it would "
            "count twice; choose algorithm/loss=reinforce, a correction that rejects, or for a ratio to the old policy "
            f"{key}.correction.anchor=old"
        )
