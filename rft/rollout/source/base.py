"""What sources that sample share: the context of a stage, and the trajectory of a completion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from rft.batch.scores import Scores, Scoring
from rft.batch.trajectory import Finish, Segment, Trajectory
from rft.data.base import SourceContext
from rft.rollout.engine.base import Completion, Request, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler

Announce = Callable[[int, int, str], None]  # the number of a request, that of its sample, the finished text


@dataclass(frozen=True)
class RolloutContext(SourceContext):
    """What a source that samples is given, beside what every source is.

    Attributes:
        sampler: samples completions. It holds the weights that a step samples with while `next` runs.
        group_size: responses to a prompt.
        sampling: how training samples.
        scoring: begins the scoring of a round of responses.
        logprobs: log-probabilities (B, T) of the `loss_mask` tokens of a batch under the current policy; a collective.
    """

    sampler: Sampler
    group_size: int
    sampling: Sampling
    scoring: Callable[[], Scoring]
    logprobs: Callable[[TensorDict], Tensor]

    def score(self, texts: list[str], rows: list[dict[str, Any]]) -> Scores:
        """The scores of N texts that answer these rows of the data set."""
        return self.scoring().finish(texts, rows)

    def requests(self, prompts: Sequence[list[int]], positions: list[int]) -> list[Request]:
        """One request of `group_size` samples for each prompt.

        Args:
            prompts: token ids.
            positions: of the prompts among all draws of the run; they decide the seeds of the samples.
        """
        samples = range(self.group_size)
        return [
            Request(prompt, [row_seed(self.seed, position, sample) for sample in samples])
            for prompt, position in zip(prompts, positions, strict=True)
        ]


def sampled_segment(completion: Completion) -> Segment:
    """The segment of a completion: all of it trains."""
    return Segment(completion.tokens, True, completion.logprobs, completion.versions)


def answer(prompt: list[int], completion: Completion, row: dict[str, Any]) -> Trajectory:
    """The trajectory of one sampled response to a prompt.

    Args:
        prompt: token ids.
        row: of the data set.
    """
    finish = Finish(completion.finish_reason, completion.text)
    return Trajectory([Segment(prompt, trains=False), sampled_segment(completion)], finish, row)
