"""The score of a response: a weighted sum of reward terms."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rft.errors import Checks, FunctionError, naming
from rft.registry import Plugin, Target, convert, did_you_mean
from rft.reward import REWARDS
from rft.reward.term import Term

LARGEST_SCORE = 1e15  # the sum of the squares of a hundred million such scores is a float32 number


class WeightedSum:
    """The weighted sum of reward terms, with the raw value of each.

    Attributes:
        accuracy: the term whose raw value is the accuracy.
        names: of the terms.
        weights: by name.
        fields: the fields of a row that the terms read.
        extracts: the term of the accuracy extracts answers.

    Args:
        terms: {term: {name, weight, options}}, or with `_target_`, the class of a `Term`, instead of the name; a
            weight of 0 only logs the term.
        accuracy: the term whose raw value is the accuracy in evaluations.

    Raises:
        ValueError: a term is malformed, or `accuracy` is not a term; names the key.
    """

    def __init__(self, terms: dict[str, dict[str, Any]], accuracy: str) -> None:
        if not terms:
            raise ValueError("reward.terms is empty: a reward needs a term; choose reward/terms=[exact_match]")
        if accuracy not in terms:
            known = f"{', '.join(terms)}{did_you_mean(accuracy, terms)}"
            raise ValueError(f"reward.accuracy={accuracy} is none of reward.terms; choose one of: {known}")
        self.accuracy = accuracy
        self.names = tuple(terms)
        check = Checks()
        self._terms = {name: check.attempt(_term, name, node) for name, node in terms.items()}
        check.end()
        self.weights = {name: weight for name, (weight, _) in self._terms.items()}
        self.fields = tuple(sorted({field for _, term in self._terms.values() for field in term.reads}))
        self.extracts = self._terms[accuracy][1].extracts

    def check(self) -> None:
        """Checks that what the terms will load exists, before any model is loaded.

        Raises:
            Problems: each names the key and the cure.
        """
        check = Checks()
        for _, term in self._terms.values():
            check.run(term.check)
        check.end()

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks that a response to this row of the data set can be right, for every term.

        Raises:
            ValueError: names the field and the cure.
        """
        for _, term in self._terms.values():
            term.check_row(row)

    def place(self, device: torch.device) -> None:
        """Sets the device of terms that are models."""
        for _, term in self._terms.values():
            term.place(device)

    def score(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores responses.

        Args:
            responses: N texts, without their prompts.
            rows: the N rows of the data set that they answer.

        Returns:
            The weighted sum (N,) float32, and the raw value (N,) float32 of every term.

        Raises:
            FunctionError: a term failed, or returned what is no number, not finite or above `LARGEST_SCORE`; names the
                term, rows and responses.
        """
        raw, total = {}, torch.zeros(len(responses))
        for name, (weight, term) in self._terms.items():
            with naming(f"the reward term {name!r}", type(term).values):
                values = term.values(responses, rows)
            raw[name] = _finite(f"the reward term {name!r}", values, responses)
            total += _finite(f"reward.terms.{name}.weight={weight}", (weight * raw[name]).tolist(), responses)
        return total, raw

    def extract(self, responses: Sequence[str]) -> list[str | None]:
        """The answer that the term of the accuracy extracts from each response; None where there is none."""
        _, term = self._terms[self.accuracy]
        return [term.extract(response) for response in responses]


class Rule(Term):
    """A registered function of one response and its row."""

    def __init__(self, name: str, plugin: Plugin) -> None:
        self.reads = plugin.facts.reads
        self.extracts = plugin.facts.extract is not None
        self._name = name
        self._plugin = plugin

    def check_row(self, row: Mapping[str, Any]) -> None:
        """See `Term.check_row`."""
        if self._plugin.facts.gold is not None:
            self._plugin.call("gold", row)

    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """See `Term.values`; `WeightedSum` checks that they are numbers."""
        values: list[Any] = []
        for number, (response, row) in enumerate(zip(responses, rows, strict=True)):
            try:
                values.append(self._plugin(response, row))
            except FunctionError as error:
                raise FunctionError(f"{self._failed(number, response)}: {error}") from error.__cause__
            except Exception as error:  # a rule may raise anything; the message names the row
                what = f"{type(error).__name__}: {error}"
                raise FunctionError(f"{self._failed(number, response)}: {what}") from error
        return values

    def _failed(self, number: int, response: str) -> str:
        return f"the reward term {self._name!r} failed on row {number}, response {_head(response)}"

    def extract(self, response: str) -> str | None:
        """See `Term.extract`."""
        return self._plugin.call("extract", response) if self.extracts else None


def _term(name: str, node: Mapping[str, Any]) -> tuple[float, Term]:
    key = f"reward.terms.{name}"
    options = {option: value for option, value in node.items() if option != "weight"}
    term: Term
    if "_target_" in options:
        term = Target(options, key, ("key",)).build(key=key)
    else:
        term = Rule(name, REWARDS.build(options, key))
    if "weight" not in node:
        raise ValueError(f"{key}.weight is missing: set the factor of the term; add `weight: 1.0`")
    return convert(node["weight"], float, f"{key}.weight"), term


def _finite(title: str, values: Any, responses: Sequence[str]) -> Tensor:
    """The scores (N,) float32; raises a FunctionError with the title for what cannot be the scores of the responses."""
    found = list(values) if isinstance(values, Sequence | Tensor) else [values]
    if len(found) != len(responses):
        raise FunctionError(f"{title} gave {len(found)} scores for {len(responses)} responses")
    numbers = [_number(value) for value in found]

    def refuse(wrong: list[int], what: str) -> None:
        shown = "; ".join(f"row {n}: {found[n]!r}, response {_head(responses[n])}" for n in wrong[:3])
        if wrong:
            raise FunctionError(f"{title} gave {len(wrong)} scores that are {what}: {shown}")

    refuse([n for n, number in enumerate(numbers) if number is None], "no numbers")
    scores = torch.tensor([number or 0.0 for number in numbers], dtype=torch.float32)  # (N,)
    refuse((~scores.isfinite()).nonzero().flatten().tolist(), "not finite")
    refuse((scores.abs() > LARGEST_SCORE).nonzero().flatten().tolist(), f"above {LARGEST_SCORE:g} in size")
    return scores


def _number(value: Any) -> float | None:
    """A number of python, numpy or torch as a float; None for anything else, text included."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def _head(response: str) -> str:
    return repr(response[:60] + "..." if len(response) > 60 else response)
