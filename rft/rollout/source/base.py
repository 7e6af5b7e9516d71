"""What sources that sample share: the context of a stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from rft.batch.scores import Scores, Scoring
from rft.data.base import SourceContext
from rft.rollout.answerer import Answerer
from rft.rollout.engine.base import Request, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler


@dataclass(frozen=True)
class Ahead:
    """How far a run samples ahead of its steps.

    Attributes:
        staleness: `rollout.staleness`, at least 1.
        in_flight: `rollout.in_flight`, groups over all ranks; None: those of `staleness` + 1 steps.
        steps: of the stage.
    """

    staleness: int
    in_flight: int | None
    steps: int


@dataclass(frozen=True)
class RolloutContext(SourceContext):
    """What a source that samples is given, beside what every source is.

    Attributes:
        sampler: samples completions. It holds the weights that a step samples with while `next` runs.
        answerer: answers rows with this sampler: by a completion each, or by an episode where the run has environments.
        group_size: responses to a prompt.
        sampling: how training samples.
        scoring: begins the scoring of a round of responses.
        ahead: how far text is sampled ahead of the steps that train on it; None: each step samples its own.
        logprobs: log-probabilities (B, T) of the `loss_mask` tokens of a batch under the current policy; a collective.
    """

    sampler: Sampler
    answerer: Answerer
    group_size: int
    sampling: Sampling
    scoring: Callable[[], Scoring]
    logprobs: Callable[[TensorDict], Tensor]
    ahead: Ahead | None = None

    def score(self, texts: list[str], rows: list[dict[str, Any]]) -> Scores:
        """The scores of N texts that answer these rows of the data set."""
        return self.scoring().finish(texts, rows)

    def requests(self, prompts: Sequence[list[int]], positions: list[int]) -> list[Request]:
        """One request of `group_size` samples for each prompt.

        Args:
            prompts: token ids.
            positions: of the prompts among all draws of the run; they decide the seeds of the samples.
        """
        return [Request(prompt, seeds) for prompt, seeds in zip(prompts, self.seeds(positions), strict=True)]

    def seeds(self, positions: Sequence[int]) -> list[list[int]]:
        """The seeds of the `group_size` samples of each prompt, by its position among all draws of the run."""
        return [[row_seed(self.seed, position, sample) for sample in range(self.group_size)] for position in positions]
