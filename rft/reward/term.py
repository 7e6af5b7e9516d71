"""The base classes of reward terms; the yaml names a term's class by `_target_`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch


@dataclass(frozen=True)
class Unscored:
    """In place of a score: the term could not judge a response. The row does not train, and no score is invented.

    Attributes:
        reason: the cause in a few words; the run counts rows by what stands before the first colon.
    """

    reason: str


class Term(ABC):
    """A term of a `WeightedSum`. The constructor loads nothing, so that a config is checked by building it.

    Attributes:
        reads: the fields of a row that the term needs.
        extracts: `extract` returns answers.
        unit: what one call in a worker process scores; None: the term is computed in the process of the run.
        waits: `values` waits for other processes, so it runs in a thread beside the other terms.
        others: the score of a response that is right for a row with another answer: `zero`; `less` than 1, since a
            response may be right in part; `any`.
    """

    reads: tuple[str, ...] = ()
    extracts: bool = False
    unit: ClassVar[Literal["row", "batch"] | None] = None
    waits: ClassVar[bool] = False
    others: Literal["zero", "less", "any"] = "zero"

    def check(self) -> None:
        """Checks that what the term will load exists, before any model is loaded.

        Raises:
            ValueError: names the key and the cure.
        """

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks that a response to this row of the data set can be right.

        Raises:
            ValueError: names the field and the cure.
        """

    def gold_responses(self, row: Mapping[str, Any]) -> Sequence[str]:
        """Responses to a row that have the score 1, in several writings; none if the row does not say what is right."""
        return ()

    def place(self, device: torch.device) -> None:
        """Sets the device of the computation; called before `values`."""

    @abstractmethod
    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        """The values of N responses.

        Args:
            responses: N texts, without their prompts.
            rows: the N rows of the data set that they answer.

        Returns:
            For each response a number, `Unscored`, or a mapping with the number as `score`, whose other numbers the
            run logs as `reward/<term>/<name>`.
        """

    def extract(self, response: str) -> str | None:
        """The answer in a response, None where there is none; equal answers have equal texts."""
        return None


class RowTerm(Term):
    """A term that scores each response by itself.

    Attributes:
        awaits: `value` returns an awaitable.
    """

    unit: ClassVar[Literal["row", "batch"] | None] = "row"
    awaits: bool = False

    @abstractmethod
    def value(self, response: str, row: Mapping[str, Any]) -> Any:
        """The value of one response; see `Term.values`."""

    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """See `Term.values`."""
        return [self.value(response, row) for response, row in zip(responses, rows, strict=True)]
