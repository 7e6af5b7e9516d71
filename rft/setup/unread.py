"""Options without effect. A value that the user typed for an option that the run does not read is refused; a default is
not. Options that are read and still cannot act are named at the start.

Most options state with their type when they are read, see `rft.conditions`. Here are the facts of the run that decide.
"""

from collections.abc import Container, Iterator, Mapping

from rft.algorithm.algorithm import Algorithm
from rft.algorithm.roles import ROLES
from rft.conditions import ANSWERS, GENERATION, GIVEN, SAMPLED, Absent, unread_fields
from rft.reward.unread import unread_reward
from rft.setup.parts import Parts
from rft.setup.schema import Run

NO_SAMPLES = "algorithm.source samples no texts"
# each is read by the mode of its name alone
MODE_NODES = ("plan", "inspect", "verify", "serve", "evaluate", "generate", "chat", "replay")
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
        unread, typed = parts.root.evaluate.unread(), {key: place for key, place in typed.items() if not place}
    elif mode == "serve":
        unread = parts.root.serve.unread(parts.engine.factory)
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
    absent, reads = _absences(parts), algorithm.reads()
    whole = unread_fields(root, "", absent)
    unread = {key: reason for key, reason in whole.items() if key.split(".")[0] not in MODE_NODES}
    for target in (parts.actor, *parts.helpers.values(), parts.engine):
        unread |= target.unread(absent)
    unread |= parts.train.unread(_absences(parts, parts.needs))
    evaluated = {"prompt", *(parts.reward.fields if parts.given is None else facts.fields)}
    for target in parts.held_out.values():
        unread |= target.unread(_absences(parts, evaluated))
    unread |= root.data.unread(root.rollout.max_new_tokens)
    unread |= {f"rollout.{name}": reason for name, reason in parts.engine.options.unread().items()}
    unread |= {f"algorithm.{name}": reason for name, reason in algorithm.unread().items()}
    if reason := absent(GENERATION):
        unread["environment"] = reason
    if not facts.scores and (reason := absent(ANSWERS)):
        unread["reward"] = f"{NO_SAMPLES if facts.sampled == 'never' else 'no sampled text is scored'}, and {reason}"
    episodes = root.environment is not None
    unread |= unread_reward(parts.reward, facts.scores, algorithm.reads_scores(), episodes)
    for role in ROLES:
        if not role.writes(reads):
            unread[role.key] = f"the algorithm reads no {' or '.join(role.columns)}, so there is no such model"
    return unread


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


def _absences(parts: Parts, fields: Container[str] = ()) -> Absent:
    """Says why the run lacks a part.

    Args:
        fields: those that something reads of the rows of a data set.
    """
    facts, reads = parts.facts, parts.algorithm.reads()
    sampled = facts.sampled != "never"
    given = not sampled or facts.given is not None or parts.warmup_facts is not None
    answers = "there is no held-out set"
    if parts.given is not None:
        answers = "eval.loss=true, which needs no answers"
    elif parts.grader is not None:
        answers = "the policy scores texts and answers none"
    reasons = {
        SAMPLED: "" if sampled else NO_SAMPLES,
        GIVEN: "" if given else "all texts that train are sampled",
        ANSWERS: "" if parts.answers else answers,
        GENERATION: "" if sampled or parts.answers else f"{NO_SAMPLES}, and {answers}",
    }

    def absent(part: str) -> str:
        kind, _, name = part.partition(" ")
        if kind == "column":
            return "" if name in reads else f"the algorithm reads no {name}"
        if kind == "field":
            return "" if name in fields else f"nothing reads the field {name!r} of these rows"
        return reasons.get(part, "")

    return absent
