"""The options of held-out evaluation, and what follows from them before a model is loaded."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from rft.algorithm.algorithm import Algorithm
from rft.conditions import ANSWERS, ReadIf, ReadWith
from rft.data.base import GivenTexts
from rft.evaluation import generation
from rft.evaluation.base import ScoreEvaluator
from rft.imports import import_part
from rft.ranges import NonNegativeInt, PositiveInt, SamplingTemperature, TopK, TopP
from rft.reward.compose import WeightedSum
from rft.rollout.engine.sampling import Sampling

# Module and class by the head of the policy; the module is imported where a run has the head.
GRADERS = {
    "score": ("rft.evaluation.preference", "PairEvaluator"),
    "step": ("rft.evaluation.process", "StepEvaluator"),
}


def grader_of(head: str) -> type[ScoreEvaluator] | None:
    """What scores held-out texts by this head of the policy; None if it is not one that scores."""
    if head not in GRADERS:
        return None
    grader: type[ScoreEvaluator] = import_part(*GRADERS[head], f"actor.head={head}")
    return grader


@dataclass
class Eval:
    """When and how held-out sets are evaluated; see `rft.evaluation.generation` and `rft.evaluation.loss`."""

    every: NonNegativeInt
    at_start: bool
    loss: bool
    samples: Annotated[NonNegativeInt, ReadWith(ANSWERS)]
    temperature: Annotated[SamplingTemperature, ReadIf("samples"), ReadWith(ANSWERS)]
    top_p: Annotated[TopP, ReadIf("samples"), ReadWith(ANSWERS)]
    top_k: Annotated[TopK, ReadIf("samples"), ReadWith(ANSWERS)]
    pass_k: Annotated[list[PositiveInt] | None, ReadIf("samples"), ReadWith(ANSWERS)]
    maj_k: Annotated[list[PositiveInt], ReadWith(ANSWERS)]

    def ks(self) -> list[int]:
        """The k of pass@k; by default the powers of two up to `samples`."""
        return [2**power for power in range(self.samples.bit_length())] if self.pass_k is None else self.pass_k

    def sampling(self, rollout: Sampling) -> Sampling:
        """How the answers are sampled: as in training, with another temperature and truncation."""
        return replace(rollout.untruncated(self.temperature), top_p=self.top_p, top_k=self.top_k)

    def check(self) -> Iterator[str]:
        """Checks that an evaluation samples the answers that its metrics need."""
        if self.loss and self.samples:
            yield f"eval.samples={self.samples}: with eval.loss=true nothing is sampled; set eval.samples=0"
        for name, wanted in (("pass_k", self.ks()), ("maj_k", self.maj_k)):
            if max(wanted, default=0) > self.samples:
                yield (
                    f"eval.{name}={wanted} asks for more answers than eval.samples={self.samples}; set eval.samples "
                    f"to at least {max(wanted)}"
                )

    def check_vote(self, reward: WeightedSum) -> Iterator[str]:
        """Checks that there are answers to vote on."""
        if self.maj_k and not reward.extracts:
            yield (
                f"eval.maj_k={self.maj_k}: reward.accuracy={reward.accuracy} does not extract an answer from a "
                "response, so there is none to vote on; set eval.maj_k=[] or choose another accuracy"
            )

    def metrics(
        self, reward: WeightedSum, grader: type[ScoreEvaluator] | None, given: GivenTexts | None, algorithm: Algorithm
    ) -> list[str]:
        """The metrics of every held-out set, the main one first.

        Args:
            reward: scores answers.
            grader: scores texts by the head of the policy, or None.
            given: makes the texts whose loss is evaluated, or None.
            algorithm: of the last stage.
        """
        if given is not None:
            names: list[str] = import_part("rft.evaluation.loss", "metric_names", "eval.loss=true")(algorithm)
            return names
        if grader is not None:
            return list(grader.metrics)
        return generation.metric_names(reward.names, reward.accuracy, self.samples, self.ks(), self.maj_k)
