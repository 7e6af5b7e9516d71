"""The score of a response: a weighted sum of reward terms."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from rft.batch.row_fields import own_copy
from rft.batch.scores import Scores, Scoring
from rft.conditions import ReadIf
from rft.distributed import World
from rft.errors import Checks, FunctionError, did_you_mean
from rft.imports import import_part
from rft.ranges import Fraction, PositiveInt
from rft.registry import convert
from rft.reward.call import Caller, CallOptions, finish_all, head
from rft.reward.route import Routes
from rft.reward.term import (
    LARGEST_SCORE,
    Offload,
    Term,
    Unscored,
    as_number,
    further_numbers,
    is_score,
    number_of,
)
from rft.reward.thought import ReadingOptions
from rft.sanitize import check_metric_name
from rft.strategy.base import Strategy

# A part, which a run with `reward.route` imports: its module and its class.
ROUTES = ("rft.reward.source_routes", "SourceRoutes")
OWN = ("weight", "call", "gate", "clip")  # keys of a term that are not its options


@dataclass(frozen=True)
class WeightedTerm:
    """A term and its part in the sum.

    Attributes:
        caller: calls the term.
        weight: factor of its value; with 0 the term is only logged.
        gate: the name of the term that must be positive for this one to count; None: it always counts.
        clip: the lowest and the highest value; None: no limits.
    """

    caller: Caller
    weight: float
    gate: str | None
    clip: tuple[float, float] | None


@dataclass(frozen=True)
class CanaryOptions:
    """Tasks that no honest response solves; see `rft.evaluation.canary`. The yaml documents each option."""

    path: str | list[str] | None
    columns: Annotated[dict[str, str | None], ReadIf("path")]
    every: Annotated[PositiveInt, ReadIf("path")]
    samples: Annotated[PositiveInt, ReadIf("path")]
    bound: Annotated[Fraction, ReadIf("path")]


class WeightedSum:
    """The weighted sum of reward terms, with the raw value of each.

    Attributes:
        accuracy: the term that says which responses are right.
        names: of the terms.
        weights: by name.
        fields: the fields that the terms read of every row.
        extracts: the terms of the accuracy extract answers.
        max_unscored: the share of a step's responses that may be unscored.
        workers: the kinds of workers that compute terms.
        concurrent: several calls of a term may run at the same time.
        has_models: a term computes with a model on the device of the run.
        offload: where its weights are while it does not compute; None: on the device of the run.
        shard: its weights are spread over the ranks; otherwise every rank holds all of them.
        canary: tasks that no honest response solves.

    Args:
        terms: {term: {name, weight, call, gate, clip, options}}; instead of the name `function`, the place of a
            function, or `_target_`, the class of a `Term`.
        accuracy: the term whose raw value is the accuracy in evaluations.
        call: options of the call of a term that does not set them, see `CallOptions`.
        max_unscored: see the attribute; with a larger share the run stops.
        route: the terms of each data source, see `SourceRoutes`.
        offload, shard: see the attributes.
        canary: see the attribute.
        reasoning, prompt_opens, include_prefill: of terms that set no others, see `ReadingOptions`.

    Raises:
        ValueError: a term is malformed, or `accuracy` is not a term; names the key.
    """

    def __init__(
        self,
        terms: dict[str, dict[str, Any]],
        accuracy: str,
        call: CallOptions,
        max_unscored: Fraction,
        route: dict[str, list[str]],
        offload: Offload,
        shard: bool,
        canary: CanaryOptions,
        reasoning: list[str],
        prompt_opens: bool | None,
        include_prefill: bool,
    ) -> None:
        if not terms:
            raise ValueError("reward.terms is empty: a reward needs a term; choose reward/terms=[exact_match]")
        if accuracy not in terms:
            known = f"{', '.join(terms)}{did_you_mean(accuracy, terms)}"
            raise ValueError(f"reward.accuracy={accuracy} is none of reward.terms; choose one of: {known}")
        self.accuracy = accuracy
        self.names = tuple(terms)
        self.max_unscored = max_unscored
        self.canary = canary
        check, reading = Checks(), ReadingOptions(reasoning, prompt_opens, include_prefill)
        self._terms = {name: check.attempt(_term, name, node, call, reading, terms) for name, node in terms.items()}
        check.end()
        self.weights = {name: term.weight for name, term in self._terms.items()}
        self.has_models = any(term.caller.term.has_model for term in self._terms.values())
        self.offload, self.shard = offload, shard
        self.workers = {term.caller.workers for term in self._terms.values()}
        self.concurrent = any(term.caller.concurrent for term in self._terms.values())
        self._routes = Routes(self.names, accuracy)
        if route:
            self._routes = import_part(*ROUTES, "reward.route")(route, self.names, accuracy)
        if shard:
            check.messages += self._shard_errors()
            check.end()
        for name, term in self._terms.items():
            self._check_gate(name, term)
        reads = [{field for name in names for field in self._term(name).reads} for names in self._routes.every()]
        self.fields = tuple(sorted(set.intersection(*reads)))
        self.extracts = all(self._term(name).extracts for name in self._routes.accuracies())

    def check(self) -> None:
        """Checks that what the terms will load exists, before any model is loaded.

        Raises:
            Problems: each names the key and the cure.
        """
        check = Checks()
        for term in self._terms.values():
            check.run(term.caller.term.check)
        check.end()

    def check_fields(self, row: Mapping[str, Any]) -> None:
        """Checks that a row has the fields that its terms read; raises a ValueError that names one that is missing."""
        for name in self._routes.terms(row):
            if missing := [field for field in self._term(name).reads if field not in row]:
                raise ValueError(f"the row has no field {missing[0]!r}, which reward.terms.{name} reads")

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks that a response to this row of the data set can be right, for every term that scores it.

        Raises:
            ValueError: names the field and the cure.
        """
        self.check_fields(row)
        for name in self._routes.terms(row):
            self._term(name).check_row(own_copy(row))

    @property
    def terms(self) -> dict[str, Term]:
        """The terms by name."""
        return {name: self._term(name) for name in self.names}

    def callers_of(self, row: Mapping[str, Any]) -> dict[str, Caller]:
        """What calls the terms that score a row, by name."""
        return {name: self._terms[name].caller for name in self._routes.terms(row)}

    def place(self, device: torch.device) -> None:
        """Sets the device of terms that are models.

        Raises:
            ValueError: the models compute where they are to be offloaded to; names the key.
        """
        if self.has_models and device.type == self.offload:
            raise ValueError(
                f"reward.offload={self.offload}: the run computes on this device, so the weights would not leave it; "
                "set reward.offload=disk or reward.offload=null"
            )
        for term in self._terms.values():
            term.caller.term.place(device, self.offload)

    def shard_models(self, world: World, make: Callable[[str, bool], Strategy]) -> None:
        """Spreads the models over the ranks with `shard`; called after `place`. The scoring is a collective then.

        Args:
            world: all processes.
            make: makes the strategy that computes in a dtype, its weights in host memory or not.
        """
        for term in self._models().values() if self.shard else ():
            term.caller.term.shard(world, lambda dtype: make(dtype, self.offload == "cpu"))

    def leave_unscored(self) -> None:
        """A response that a term cannot judge has no score from now on, whatever `call.failed` says."""
        for term in self._terms.values():
            term.caller.failed = "drop_row"

    def begin(self) -> "SumScoring":
        """Begins the scoring of a round of responses."""
        return SumScoring(self._terms, self._routes)

    def score(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Scores:
        """Scores N responses; see `SumScoring.finish`."""
        return self.begin().finish(responses, rows)

    def close(self) -> None:
        """Ends the threads and processes of the terms."""
        for term in self._terms.values():
            term.caller.runner.close()

    def accuracy_terms(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """The term of each row that says which responses to it are right; see `Scores.accuracies`."""
        return [self._routes.accuracy(row) for row in rows]

    def _term(self, name: str) -> Term:
        return self._terms[name].caller.term

    def _models(self) -> dict[str, WeightedTerm]:
        return {name: term for name, term in self._terms.items() if term.caller.term.has_model}

    def _shard_errors(self) -> Iterator[str]:
        """A message for every option that does not go with `shard`."""
        if self.offload == "disk":
            yield (
                "reward.offload=disk: the shards of a model are not read again each time; set reward.offload=cpu or "
                "null, or reward.shard=false"
            )
        for name, term in self._models().items():
            if not term.caller.term.shards:
                yield (
                    f"reward.shard=true: reward.terms.{name} ({type(term.caller.term).__name__}) needs its whole model "
                    "on each rank; set reward.shard=false, or compute the term on a server (reward/terms=[remote])"
                )
            if term.caller.tries > 1:
                yield (
                    f"reward.terms.{name}.call.tries={term.caller.tries}: with reward.shard=true all ranks compute "
                    "this term together, and one of them cannot repeat a call; set it to 1"
                )

    def _check_gate(self, name: str, term: WeightedTerm) -> None:
        for names in self._routes.every():
            if term.gate is not None and name in names and term.gate not in names:
                raise ValueError(
                    f"reward.terms.{name}.gate={term.gate}: reward.route has a source with {name} and without "
                    f"{term.gate}; add it there"
                )

    def extract(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """The answer that the term of the accuracy extracts from each response; None where there is none."""
        callers = [self._terms[self._routes.accuracy(row)].caller for row in rows]
        return [one.extract(*pair) for one, *pair in zip(callers, responses, rows, strict=True)]


class SumScoring(Scoring):
    """Scores one round of responses by the terms of a `WeightedSum`.

    Args:
        terms: by name.
        routes: the terms of each row.
    """

    def __init__(self, terms: Mapping[str, WeightedTerm], routes: Routes) -> None:
        self._terms = terms
        self._routes = routes
        self._calls = {name: term.caller.begin() for name, term in terms.items()}
        self._added: set[int] = set()

    def add(self, number: int, response: str, row: Mapping[str, Any]) -> None:
        """Terms in worker processes, threads and on servers begin to score the response."""
        self._added.add(number)
        for name in self._routes.terms(row):
            self._calls[name].add(number, response, row)

    def cancel(self) -> None:
        for calls in self._calls.values():
            calls.cancel()

    def finish(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Scores:
        """Scores N responses; see `Scoring.finish`.

        Raises:
            FunctionError: a term failed where `call.failed=stop`, or returned what is no number, not finite or above
                `LARGEST_SCORE`; names the term, rows and responses.
        """
        for number, (response, row) in enumerate(zip(responses, rows, strict=True)):
            if number not in self._added:
                self.add(number, response, row)
        unscored: list[dict[str, str]] = [{} for _ in responses]
        whole_group = torch.zeros(len(responses), dtype=torch.bool)  # (N,)
        places: dict[str, list[int]] = {}  # the responses that each term scores
        raw: dict[str, Tensor] = {}
        numbers: dict[str, Tensor] = {}
        for name, by_number in finish_all(self._calls).items():
            term, title = self._terms[name], f"the reward term {name!r}"
            failed, places[name] = term.caller.failed, sorted(by_number)
            outcomes = [by_number[number] for number in places[name]]
            scored = [responses[number] for number in places[name]]
            term.caller.report(outcomes, scored)
            values = [number_of(outcome) for outcome in outcomes]
            if failed != "stop":  # otherwise `_finite` names the row
                values = [one if isinstance(one, Unscored) or is_score(one) else Unscored("no_score") for one in values]
            scores = _finite(title, [0.0 if isinstance(one, Unscored) else one for one in values], scored)
            for place, value in enumerate(values):
                if isinstance(value, Unscored):
                    number = places[name][place]
                    unscored[number][name] = term.caller.reason(value)
                    whole_group[number] |= failed == "drop_group" and term.weight != 0
                    scores[place] = failed if isinstance(failed, float) else torch.nan
            raw[name] = torch.full((len(responses),), torch.nan)
            raw[name][places[name]] = scores
            for other, column in further_numbers(outcomes, term.caller.numbers).items():
                numbers[f"{name}/{other}"] = torch.full((len(responses),), torch.nan)
                numbers[f"{name}/{other}"][places[name]] = torch.tensor(column)
        return Scores(self._total(raw, places, responses), raw, unscored, whole_group, numbers)

    def _total(self, raw: dict[str, Tensor], places: dict[str, list[int]], responses: Sequence[str]) -> Tensor:
        """The weighted sum (N,), NaN where a term that counts is unscored."""
        total = torch.zeros(len(responses))  # (N,)
        for name, term in self._terms.items():
            if term.weight == 0:
                continue
            value = raw[name] if term.clip is None else raw[name].clamp(*term.clip)
            weighted = term.weight * value
            if term.gate is not None:
                gate = raw[term.gate]
                weighted = torch.where(gate > 0, weighted, 0.0).masked_fill(gate.isnan(), torch.nan)
            chosen = [number for number in places[name] if not weighted[number].isnan()]
            title = f"reward.terms.{name}.weight={term.weight}"
            weighted[chosen] = _finite(title, weighted[chosen].tolist(), [responses[number] for number in chosen])
            total[places[name]] += weighted[places[name]]
        return total


def _term(
    name: str, node: Mapping[str, Any], call: CallOptions, reading: ReadingOptions, terms: Mapping[str, Any]
) -> WeightedTerm:
    key = f"reward.terms.{name}"
    check_metric_name(name, key)
    options = {option: value for option, value in node.items() if option not in OWN}
    caller = Caller(name, options, convert(node.get("call", {}), dict, f"{key}.call"), call, reading)
    gate = convert(node.get("gate"), str | None, f"{key}.gate")
    if gate is not None and (gate == name or gate not in terms):
        others = [other for other in terms if other != name]
        known = f"there are {', '.join(others)}" if others else "there is none"
        raise ValueError(f"{key}.gate={gate}: name another term of reward.terms; {known}{did_you_mean(gate, others)}")
    clip = convert(node.get("clip"), tuple[float, float] | None, f"{key}.clip")
    if clip is not None and not clip[0] < clip[1]:
        raise ValueError(f"{key}.clip={list(clip)}: expected [low, high] with low < high, or null")
    if "weight" not in node:
        raise ValueError(f"{key}.weight is missing: set the factor of the term; add `weight: 1.0`")
    return WeightedTerm(caller, convert(node["weight"], float, f"{key}.weight"), gate, clip)


def _finite(title: str, values: Sequence[Any], responses: Sequence[str]) -> Tensor:
    """The scores (N,) float32; raises a FunctionError with the title for what cannot be the scores of the responses."""
    numbers = [as_number(value) for value in values]

    def refuse(wrong: list[int], what: str) -> None:
        shown = "; ".join(f"row {n}: {values[n]!r}, response {head(responses[n])}" for n in wrong[:3])
        if wrong:
            raise FunctionError(f"{title} gave {len(wrong)} scores that are {what}: {shown}")

    refuse([n for n, number in enumerate(numbers) if number is None], "no numbers")
    scores = torch.tensor([number or 0.0 for number in numbers], dtype=torch.float32)  # (N,)
    refuse((~scores.isfinite()).nonzero().flatten().tolist(), "not finite")
    refuse((scores.abs() > LARGEST_SCORE).nonzero().flatten().tolist(), f"above {LARGEST_SCORE:g} in size")
    return scores
