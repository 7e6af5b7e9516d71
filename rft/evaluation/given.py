"""Given responses to held-out prompts, which are scored as those that the model answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rft.batch.row_fields import PROMPT_OPENS
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.evaluation.base import Progress, RowEvaluator, collect, share
from rft.evaluation.generation import GenerationResult, PromptAnswers, split_answers, with_metrics
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


@dataclass(frozen=True)
class GivenEvaluator(RowEvaluator):
    """Scores given responses; its metrics are those of `GenerationEvaluator` on the same responses.

    Attributes:
        world: the processes of the run; each scores its share of the rows.
        sets: the held-out rows, by the name of their set.
        answers: the responses to the rows of each set, in their order; all have a `response` or none has, and all have
            as many `samples`.
        reward: scores the responses.
        pass_k, maj_k: see `GenerationOptions`.
    """

    world: World
    sets: Mapping[str, Rows]
    answers: Mapping[str, Sequence[GivenAnswers]]
    reward: WeightedSum
    pass_k: list[int]
    maj_k: list[int]

    def evaluate(self, progress: Progress) -> dict[str, GenerationResult]:
        results = {}
        for name, rows in self.sets.items():
            given, greedy, samples = self.answers[name], list[PromptAnswers](), list[PromptAnswers]()
            with progress(f"score {name}", len(rows)) as show:
                if given[0].response is not None:
                    single = [[] if one.response is None else [one.response] for one in given]
                    tokens = [[] if one.tokens is None else [one.tokens] for one in given]
                    greedy = self._score(rows, single, tokens, [[one.prompt_opens] for one in given])
                if given[0].samples:
                    opens = [one.samples_open for one in given]
                    samples = self._score(rows, [one.samples for one in given], [[] for _ in given], opens)
                show(len(rows))
            results[name] = GenerationResult(rows, greedy, samples)
        return with_metrics(results, self.reward.accuracy, self.pass_k, self.maj_k, self.world)

    def _score(
        self,
        rows: Rows,
        texts: Sequence[list[str]],
        tokens: Sequence[list[int]],
        opens: Sequence[list[str | None]],
    ) -> list[PromptAnswers]:
        """Scored answers of all rows in order, on every rank; each rank scores its share."""
        indices = share(self.world, rows)
        local = [texts[index] for index in indices]
        answered = [
            rows[index] | ({} if mark is None else {PROMPT_OPENS: mark})
            for index in indices
            for _, mark in zip(texts[index], opens[index] or [None] * len(texts[index]), strict=True)
        ]
        scores = self.reward.score([text for group in local for text in group], answered)
        answers = split_answers(self.reward, answered, local, [tokens[index] for index in indices], scores)
        return collect(self.world, dict(zip(indices, answers, strict=True)), len(rows))
