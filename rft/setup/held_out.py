"""What evaluates the held-out sets of a run, and the metrics that it will have."""

from rft.algorithm.algorithm import Algorithm
from rft.data.base import GivenTexts, SourceFacts, given_texts
from rft.evaluation import generation, loss
from rft.evaluation.preference import PairEvaluator, ScoreEvaluator
from rft.evaluation.process import StepEvaluator
from rft.registry import Target
from rft.reward.compose import WeightedSum
from rft.setup.schema import Data, Eval

GRADERS: dict[str, type[ScoreEvaluator]] = {"score": PairEvaluator, "step": StepEvaluator}  # by the head of the policy


def held_out_texts(evaluation: Eval, source: Target, facts: SourceFacts) -> GivenTexts | None:
    """What makes the batches of held-out texts; None if their loss is not evaluated."""
    if not evaluation.loss:
        return None
    if facts.sampled != "never":
        raise ValueError(
            "eval.loss=true: the engine samples texts that train, so held-out rows alone have no loss; set "
            "eval.loss=false, which scores answers to held-out prompts"
        )
    return given_texts(source.factory, source.options)


def metrics_of_run(
    data: Data,
    evaluation: Eval,
    reward: WeightedSum,
    grader: type[ScoreEvaluator] | None,
    given: GivenTexts | None,
    algorithm: Algorithm,
) -> list[str]:
    """The metrics of the run's evaluations, the main one first; without held-out sets, the loss of training."""
    if given is not None:
        names = loss.metric_names(algorithm)
    elif grader is not None:
        names = list(grader.metrics)
    else:
        wanted = (evaluation.samples, evaluation.ks(), evaluation.maj_k)
        names = generation.metric_names(reward.names, reward.accuracy, *wanted)
    found = [f"eval/{name}/{number}" for name in data.held_out() for number in names]
    return found or [f"loss/{algorithm.policy.terms[0].name}"]
