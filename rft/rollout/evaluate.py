"""Held-out evaluation: greedy accuracy, mean of n samples, unbiased pass@k, each with its standard error."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from rft.data.encode import Encoder
from rft.distributed import World
from rft.rollout.engine import Engine, Request, Sampling, row_seed
from rft.rollout.source import Score


class Evaluator:
    """Answers held-out sets with the engine and scores the answers.

    Args:
        world, engine, encoder, score: as in training.
        sets: rows by the name of the set.
        accuracy: the reward term that tells right from wrong.
        greedy: how the one greedy answer is drawn.
        sampling: how the `samples` answers are drawn.
        samples: answers per prompt for mean@n and pass@k; 0 for greedy accuracy alone.
        pass_k: the k of pass@k.
        seed: of the samples; the same at every evaluation.
    """

    def __init__(
        self,
        world: World,
        engine: Engine,
        encoder: Encoder,
        score: Score,
        sets: dict[str, list[dict[str, Any]]],
        accuracy: str,
        greedy: Sampling,
        sampling: Sampling,
        samples: int,
        pass_k: list[int],
        seed: int,
    ) -> None:
        self._world = world
        self._engine = engine
        self._encoder = encoder
        self._score = score
        self._sets = sets
        self._accuracy = accuracy
        self._greedy = greedy
        self._sampling = sampling
        self._samples = samples
        self._pass_k = pass_k
        self._seed = seed

    def run(
        self, progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
    ) -> tuple[dict[str, float], dict[str, list[dict[str, Any]]]]:
        """Evaluates every set.

        Args:
            progress: opens a progress bar (name, total) that is called with the number of rows that are done.

        Returns:
            `eval/<set>/accuracy`, `eval/<set>/<term>`, each with `_stderr`, and `mean@n`, `pass@k`; and the greedy
            answers of every set, for people to read.
        """
        numbers: dict[str, float] = {}
        answers: dict[str, list[dict[str, Any]]] = {}
        for name, rows in self._sets.items():
            with progress(f"evaluate {name}", len(rows)) as show:
                greedy = self._answer(rows, self._greedy, 1, show)
            for term in greedy[0]["terms"]:
                shown = "accuracy" if term == self._accuracy else term
                values = [answer["terms"][term][0] for answer in greedy]
                numbers |= with_error(f"eval/{name}/{shown}", values)
            numbers[f"eval/{name}/length"] = sum(a["tokens"][0] for a in greedy) / len(greedy)
            answers[name] = [
                {"prompt": a["row"]["prompt"], "response": a["texts"][0], "score": a["terms"][self._accuracy][0]}
                for a in greedy
            ]
            if self._samples:
                total = len(rows) * self._samples
                with progress(f"sample {name}", total) as show:
                    drawn = self._answer(rows, self._sampling, self._samples, show)
                right = [answer["terms"][self._accuracy] for answer in drawn]
                numbers |= with_error(f"eval/{name}/mean@{self._samples}", [sum(r) / len(r) for r in right])
                for k in self._pass_k:
                    passed = [pass_at_k(len(r), sum(value == 1.0 for value in r), k) for r in right]
                    numbers |= with_error(f"eval/{name}/pass@{k}", passed)
        return numbers, answers

    def _answer(
        self, rows: list[dict[str, Any]], sampling: Sampling, samples: int, progress: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """Answers of all rows in order, on every rank; each rank does its share."""
        mine = list(range(self._world.rank, len(rows), self._world.size))
        prompts = self._encoder.prompts([rows[number] for number in mine])
        requests = [
            Request(prompt, [row_seed(self._seed, number, sample) for sample in range(samples)])
            for prompt, number in zip(prompts, mine, strict=True)
        ]
        completions = self._engine.generate(requests, sampling, progress)
        texts = [completion.text for group in completions for completion in group]
        _, terms = self._score(texts, [rows[number] for number in mine for _ in range(samples)])
        found = {}
        for place, number in enumerate(mine):
            part = slice(place * samples, (place + 1) * samples)
            found[number] = {
                "row": rows[number],
                "texts": texts[part],
                "tokens": [len(completion.tokens) for completion in completions[place]],
                "terms": {name: values[part].tolist() for name, values in terms.items()},
            }
        everything = {number: answer for part in self._world.gather(found) for number, answer in part.items()}
        return [everything[number] for number in range(len(rows))]


def measured(terms: Iterable[str], accuracy: str, samples: int, pass_k: list[int]) -> list[str]:
    """The numbers that an evaluation gives for every set, beside their standard errors."""
    sampled = [f"mean@{samples}", *(f"pass@{k}" for k in pass_k)] if samples else []
    return ["accuracy", *(term for term in terms if term != accuracy), "length", *sampled]


def with_error(name: str, values: list[float]) -> dict[str, float]:
    """The mean of the values and, as `<name>_stderr`, its standard error over prompts."""
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return {name: mean, f"{name}_stderr": math.sqrt(spread / len(values))}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right (Chen et al., 2107.03374).

    Args:
        n: samples drawn, at least k.
        correct: how many of them are right.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
