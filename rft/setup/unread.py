"""Options without effect. A value that the user typed for an option that the run does not read is refused; a default is
not. Options that are read and still cannot act are named at the start.

Most options state with their type when they are read, see `rft.conditions`. Here are the facts of the run that decide.
"""

from collections.abc import Iterator, Mapping

from rft.algorithm.algorithm import Algorithm
from rft.algorithm.roles import ROLES
from rft.conditions import (
    ANSWERS,
    GENERATION,
    GIVEN,
    SAMPLED,
    SERVED_MODEL,
    SERVED_REWARD,
    Absent,
    fields_of,
    unread_options,
)
from rft.reward.call import WORKERS
from rft.reward.compose import CanaryOptions
from rft.rollout.engine.base import Engine
from rft.setup.parts import Parts
from rft.setup.schema import Run

NO_SAMPLES = "algorithm.source samples no texts"
COLUMN, FIELD = "column ", "field "
# each is read by the mode of its name alone
MODE_NODES = ("plan", "inspect", "verify", "serve", "evaluate", "generate", "chat", "replay")
OF_SAMPLED_ANSWERS = ("rollout", "eval.temperature", "eval.top_p", "eval.top_k", "actor.path", "actor.model_config")
TRAINING_MODES = ("train", "plan", "inspect", "doctor", "verify", "replay")  # the others only sample or score


def check_typed(typed: Mapping[str, str], parts: Parts) -> Iterator[str]:
    """Checks that the run reads every value that the user typed.

    Args:
        typed: where each was typed, by its yaml key.
        parts: of the run.

    Yields:
        A message for every value that is not read.
    """
    mode, unread = parts.root.mode, unread_keys(parts)  # of all modes: an unmade part leaves out the check
    if mode == "evaluate":  # it takes the yaml file of a run, so that only the command line counts
        unread, typed = unread_by_evaluate(parts.root), {key: place for key, place in typed.items() if not place}
    elif mode == "serve":
        unread = unread_serve_keys(parts)
    elif mode not in TRAINING_MODES:
        unread = {}
    for key, place in typed.items():
        node = key.split(".")[0]
        if node in MODE_NODES and node != mode and not place:
            yield f"{key}: mode={mode} does not read it; take it out, or set mode={node}"
        above = [".".join(key.split(".")[:count]) for count in range(1, key.count(".") + 2)]
        if reason := next((unread[name] for name in above if name in unread), ""):
            yield f"{place and f'{place}: '}{key}: this run does not read it ({reason}); take it out"


def unread_keys(parts: Parts) -> dict[str, str]:
    """The reason for every key that a training run does not read; for a node it holds for all keys below."""
    root, facts, algorithm = parts.root, parts.facts, parts.algorithm
    absent = _absences(parts)
    found = unread_options(type(root.rollout), fields_of(root.rollout), "rollout", absent)
    nodes = {"eval": root.eval, "data": root.data, "algorithm": root.algorithm, "warmup": root.warmup}
    for name, node in nodes.items():
        if node is not None:
            found |= unread_options(type(node), fields_of(node), name, absent)
    for target in (parts.actor, *parts.helpers.values(), parts.engine):
        found |= target.unread(absent)
    fields = {parts.train.key: parts.needs}
    evaluated = {"prompt", *(parts.reward.fields if parts.given is None else facts.fields)}
    fields |= {target.key: evaluated for target in parts.held_out.values()}
    for target in (parts.train, *parts.held_out.values()):
        found |= target.unread(_fields_absent(fields[target.key], absent))
    if (length := root.rollout.max_new_tokens) != root.data.max_response_tokens:
        found["data.max_response_tokens"] = f"rollout.max_new_tokens={length} takes its place"
    found |= {f"rollout.{name}": reason for name, reason in parts.engine.options.unread().items()}
    found |= {f"algorithm.{name}": reason for name, reason in algorithm.unread().items()}
    if reason := absent(GENERATION):
        found["environment"] = reason
    if not facts.scores and (reason := absent(ANSWERS)):
        found["reward"] = f"{NO_SAMPLES if facts.sampled == 'never' else 'no sampled text is scored'}, and {reason}"
    found |= unread_options(CanaryOptions, fields_of(parts.reward.canary), "reward.canary", absent)
    if not facts.scores:
        found["reward.canary"] = "no sampled text is scored"
    if not (facts.scores and algorithm.reads_scores()):
        found |= {f"reward.terms.{name}.weight": "nothing trains by the scores" for name in parts.reward.names}
    if not parts.reward.has_models:
        reason = "no term of the reward computes with a model of this process"
        found |= dict.fromkeys(("reward.offload", "reward.shard"), reason)
    if all(term.thoughts == "keep" for term in parts.reward.terms.values()):
        reason = "no term of the reward reads an answer, or the form of a response"
        found |= dict.fromkeys(("reward.reasoning", "reward.prompt_opens"), reason)
    if root.environment is not None:
        reason = "in an episode a prompt begins the first answer, and terms read the last one"
        keys = ("reward", *(f"reward.terms.{name}" for name in parts.reward.names))
        found |= dict.fromkeys((f"{key}.include_prefill" for key in keys), reason)
    if not parts.reward.concurrent:
        found["reward.call.concurrency"] = "all terms are computed in the process of the run, one call at a time"
    for kind in WORKERS:
        if kind not in parts.reward.workers:
            found[f"reward.call.{kind}"] = f"no term has call.workers={kind}"
    reads = algorithm.reads()
    for role in ROLES:
        if not role.writes(reads):
            found[role.key] = f"the algorithm reads no {' or '.join(role.columns)}, so there is no such model"
    return found


def unread_by_evaluate(root: Run) -> dict[str, str]:
    """The reason for every key that mode=evaluate does not read, with `evaluate.responses` or without."""
    evaluate = root.evaluate
    found = unread_options(type(evaluate), fields_of(evaluate), "evaluate", lambda part: "")
    if evaluate.responses is not None:
        found |= dict.fromkeys(OF_SAMPLED_ANSWERS, f"evaluate.responses={evaluate.responses} has the answers")
    return found


def unread_serve_keys(parts: Parts) -> dict[str, str]:
    """The reason for every key of `serve` that mode=serve does not read."""
    engine: type[Engine] = parts.engine.factory
    served = engine.facts.servers
    no_model = f"rollout.engine._target_={engine.__name__} has no servers, so reward terms are served"
    absent = {
        SERVED_MODEL: "" if served else no_model,
        SERVED_REWARD: "a model is served; rollout=hf serves reward terms" if served else "",
    }
    serve = parts.root.serve
    return unread_options(type(serve), fields_of(serve), "serve", lambda part: absent[part])


def notices(run: Run, algorithm: Algorithm, exact: bool) -> Iterator[str]:
    """Yields messages about options that have no effect in the run, or another than users expect.

    Args:
        run: its config.
        algorithm: of its second stage.
        exact: whether trainer and engine compute the same log-probabilities of sampled tokens, up to rounding.
    """
    updates, correction = run.batch.minibatches * run.batch.epochs, algorithm.correction
    if run.rollout.truncates():
        biased = "; ratios of algorithm.correction have the probability that is kept as their mean, not 1"
        yield (
            "rollout.top_p, top_k, min_p or first_token change the distribution that is sampled, not the one "
            f"that trains: rollout/logprob_gap measures the difference of the two{'' if correction is None else biased}"
        )
    if idle := algorithm.idle_options(updates):
        yield (
            "one update per batch: the old policy is the one that trains, so ratios are 1 and "
            f"{', '.join(f'algorithm.{name}' for name in idle)} have no effect; set batch.minibatches or "
            "batch.epochs above 1"
        )
    if exact and correction is not None and (correction.anchor == "old" or updates == 1):
        yield (
            "trainer and engine compute the same log-probabilities in float32, so the ratios of algorithm.correction "
            "are 1 up to rounding and it has no effect; it acts with another dtype or with truncated sampling"
        )


def _absences(parts: Parts) -> Absent:
    facts, warmup = parts.facts, parts.warmup_facts
    sampled = facts.sampled != "never"
    given = not sampled or facts.given is not None or warmup is not None
    answers = "there is no held-out set"
    if parts.given is not None:
        answers = "eval.loss=true, which needs no answers"
    elif parts.grader is not None:
        answers = "the policy scores texts and answers none"
    absent = {
        SAMPLED: "" if sampled else NO_SAMPLES,
        GIVEN: "" if given else "all texts that train are sampled",
        ANSWERS: "" if parts.answers else answers,
        GENERATION: "" if sampled or parts.answers else f"{NO_SAMPLES}, and {answers}",
    }
    reads = parts.algorithm.reads()

    def reason(part: str) -> str:
        column = part.removeprefix(COLUMN)
        if column == part:
            return absent.get(part, "")
        return "" if column in reads else f"the algorithm reads no {column}"

    return reason


def _fields_absent(read: set[str], absent: Absent) -> Absent:
    def reason(part: str) -> str:
        field = part.removeprefix(FIELD)
        if field == part:
            return absent(part)
        return "" if field in read else f"nothing reads the field {field!r} of these rows"

    return reason
