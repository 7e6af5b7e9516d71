"""Given responses to held-out prompts, which are scored as those that the model answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rft.batch.row_fields import PROMPT_OPENS
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.evaluation.base import Progress, RowEvaluator, collect, share
from rft.evaluation.generation import Answered, GenerationResult, PromptAnswers, results_of, split_answers
from rft.reward.compose import WeightedSum


@dataclass(frozen=True)
class GivenAnswers:
    """The given responses to one prompt.

    Attributes:
        response: that counts as the greedy answer; None if there are only samples.
        tokens: its number of tokens, None if it is not known.
        samples: further responses.
        prompt_opens: the mark of the thought in which the prompt of the response ended; None where it ended in none.
        samples_open: the same of each of the samples; empty where none is known.
    """

    response: str | None
    tokens: int | None
    samples: list[str]
    prompt_opens: str | None = None
    samples_open: list[str | None] = field(default_factory=list)


class GivenEvaluator(RowEvaluator):
    """Scores given responses; its metrics are those of `GenerationEvaluator` on the same responses.

    Args:
        world: the processes of the run; each scores its share of the rows.
        sets: the held-out rows, by the name of their set.
        answers: the responses to the rows of each set, in their order; all have a `response` or none has, and all have
            as many `samples`.
        reward: scores the responses.
        pass_k, maj_k: see `GenerationOptions`.
    """

    def __init__(
        self,
        world: World,
        sets: Mapping[str, Rows],
        answers: Mapping[str, Sequence[GivenAnswers]],
        reward: WeightedSum,
        pass_k: list[int],
        maj_k: list[int],
    ) -> None:
        self._world = world
        self._sets = sets
        self._answers = answers
        self._reward = reward
        self._ks = pass_k, maj_k

    def evaluate(self, progress: Progress) -> dict[str, GenerationResult]:
        """See `RowEvaluator.evaluate`."""
        answered = {}
        for name, rows in self._sets.items():
            given, greedy, samples = self._answers[name], list[PromptAnswers](), list[PromptAnswers]()
            with progress(f"score {name}", len(rows)) as show:
                if given[0].response is not None:
                    single = [[] if one.response is None else [one.response] for one in given]
                    tokens = [[] if one.tokens is None else [one.tokens] for one in given]
                    greedy = self._score(rows, single, tokens, [[one.prompt_opens] for one in given])
                if given[0].samples:
                    opens = [one.samples_open for one in given]
                    samples = self._score(rows, [one.samples for one in given], [[] for _ in given], opens)
                show(len(rows))
            answered[name] = Answered(rows, greedy, samples)
        return results_of(answered, self._reward.accuracy, *self._ks, self._world)

    def _score(
        self,
        rows: Rows,
        texts: Sequence[list[str]],
        tokens: Sequence[list[int]],
        opens: Sequence[list[str | None]],
    ) -> list[PromptAnswers]:
        """Scored answers of all rows in order, on every rank; each rank scores its share."""
        indices = share(self._world, rows)
        own = [texts[index] for index in indices]
        answered = [
            rows[index] | ({} if mark is None else {PROMPT_OPENS: mark})
            for index in indices
            for _, mark in zip(texts[index], opens[index] or [None] * len(texts[index]), strict=True)
        ]
        scores = self._reward.score([text for group in own for text in group], answered)
        answers = split_answers(self._reward, answered, own, [tokens[index] for index in indices], scores)
        return collect(self._world, dict(zip(indices, answers, strict=True)), len(rows))
