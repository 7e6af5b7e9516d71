"""Held-out evaluation: greedy accuracy, mean of n samples, unbiased pass@k and maj@k, each with its standard error."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.evaluation.base import HeldOut, Measured, Progress
from rft.evaluation.estimators import maj_at_k, pass_at_k
from rft.rollout.engine.base import Request, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler
from rft.rollout.source.rollout import Score


@dataclass
class Answers:
    """Some answers to one prompt: texts, numbers of tokens, what each gives as its answer, values of the terms."""

    texts: list[str]
    tokens: list[int]
    extracted: list[str | None]
    terms: dict[str, list[float]]


@dataclass
class Answered(Measured):
    """A held-out set with what was answered, prompt by prompt.

    Attributes:
        greedy: one answer each.
        drawn: the samples; empty where none are wanted.
        values: {number: its value for every prompt}.
    """

    greedy: list[Answers]
    drawn: list[Answers]
    values: dict[str, list[float]]

    def numbers(self, chosen: Sequence[int]) -> dict[str, list[float]]:
        """See `Measured.numbers`."""
        return {name: [values[place] for place in chosen] for name, values in self.values.items()}

    def texts(self) -> list[dict[str, Any]]:
        """The greedy answers."""
        return [
            {"prompt": row["prompt"], "response": answers.texts[0], "score": right}
            for row, answers, right in zip(self.rows, self.greedy, self.values["accuracy"], strict=True)
        ]


class Evaluator(HeldOut):
    """Answers held-out sets with the sampler and scores the answers.

    Args:
        world, sampler, encoder, score: as in training.
        extract: the answers that texts give, in normal form, None where there is none.
        sets: rows by the name of the set.
        accuracy: the reward term that tells right from wrong.
        greedy: how the one greedy answer is drawn.
        sampling: how the `samples` answers are drawn.
        samples: answers per prompt for mean@n, pass@k and maj@k; 0 for greedy accuracy alone.
        pass_k, maj_k: the k of pass@k and maj@k.
        seed: of the samples; the same at every evaluation.
    """

    def __init__(
        self,
        world: World,
        sampler: Sampler,
        encoder: Encoder,
        score: Score,
        extract: Callable[[Sequence[str]], list[str | None]],
        sets: dict[str, Rows],
        accuracy: str,
        greedy: Sampling,
        sampling: Sampling,
        samples: int,
        pass_k: list[int],
        maj_k: list[int],
        seed: int,
    ) -> None:
        self._world = world
        self._sampler = sampler
        self._encoder = encoder
        self._score = score
        self._extract = extract
        self._sets = sets
        self._accuracy = accuracy
        self._greedy = greedy
        self._sampling = sampling
        self._samples = samples
        self._pass_k = pass_k
        self._maj_k = maj_k
        self._seed = seed

    def measure(self, progress: Progress) -> dict[str, Answered]:
        """Answers every set. See `HeldOut.measure`."""
        sets = {}
        for name, rows in self._sets.items():
            with progress(f"evaluate {name}", len(rows)) as show:
                greedy = self._answer(rows, self._greedy, 1, show)
            drawn = []
            if self._samples:
                with progress(f"sample {name}", len(rows) * self._samples) as show:
                    drawn = self._answer(rows, self._sampling, self._samples, show)
            sets[name] = Answered(rows, greedy, drawn, self._values(greedy, drawn))
        return sets

    def _values(self, greedy: list[Answers], drawn: list[Answers]) -> dict[str, list[float]]:
        values = {
            "accuracy" if term == self._accuracy else term: [answers.terms[term][0] for answers in greedy]
            for term in greedy[0].terms
        }
        values["length"] = [float(answers.tokens[0]) for answers in greedy]
        if drawn:
            n, right = self._samples, [answers.terms[self._accuracy] for answers in drawn]
            solved = [[value == 1.0 for value in row] for row in right]
            values[f"mean@{n}"] = [sum(row) / n for row in right]
            values |= {f"pass@{k}": [pass_at_k(n, sum(row), k) for row in solved] for k in self._pass_k}
            votes = [(answers.extracted, row) for answers, row in zip(drawn, solved, strict=True)]
            values |= {f"maj@{k}": [maj_at_k(*vote, k) for vote in votes] for k in self._maj_k}
        return values

    def _answer(self, rows: Rows, sampling: Sampling, samples: int, progress: Callable[[int], None]) -> list[Answers]:
        """Answers of all rows in order, on every rank; each rank does its share."""
        mine = list(range(self._world.rank, len(rows), self._world.size))
        prompts = self._encoder.prompts([rows[number] for number in mine])
        requests = [
            Request(prompt, [row_seed(self._seed, number, sample) for sample in range(samples)])
            for prompt, number in zip(prompts, mine, strict=True)
        ]
        completions = self._sampler.generate(requests, sampling, progress)
        texts = [completion.text for group in completions for completion in group]
        _, terms = self._score(texts, [rows[number] for number in mine for _ in range(samples)])
        extracted = self._extract(texts)
        found = {}
        for place, number in enumerate(mine):
            part = slice(place * samples, (place + 1) * samples)
            found[number] = Answers(
                texts[part],
                [len(completion.tokens) for completion in completions[place]],
                extracted[part],
                {name: values[part].tolist() for name, values in terms.items()},
            )
        everything = {number: answers for part in self._world.gather(found) for number, answers in part.items()}
        return [everything[number] for number in range(len(rows))]


def measured(terms: Iterable[str], accuracy: str, samples: int, pass_k: list[int], maj_k: list[int]) -> list[str]:
    """The numbers that an evaluation gives for every set, beside their standard errors."""
    passed, voted = [f"pass@{k}" for k in pass_k], [f"maj@{k}" for k in maj_k]
    sampled = [f"mean@{samples}", *passed, *voted] if samples else []
    return ["accuracy", *(term for term in terms if term != accuracy), "length", *sampled]
