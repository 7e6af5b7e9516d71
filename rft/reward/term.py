"""The base class of reward terms that are classes, such as models; the yaml names them by `_target_`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Unscored:
    """In place of a score: the term could not judge a response. The row does not train, and no score is invented.

    Attributes:
        reason: the cause in a few words, the same for the same cause: the run counts the rows of each reason.
    """

    reason: str


class Term(ABC):
    """A term of a `WeightedSum`. The constructor loads nothing, so that a config is checked by building it.

    Attributes:
        reads: the fields of a row that the term needs.
        extracts: `extract` returns answers.
    """

    reads: tuple[str, ...] = ()
    extracts: bool = False

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

    def place(self, device: torch.device) -> None:
        """Sets the device of the computation; called before `values`."""

    @abstractmethod
    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Sequence[float | Unscored]:
        """The values (N,) of N responses; `Unscored` for a response that the term could not judge.

        Args:
            responses: N texts, without their prompts.
            rows: the N rows of the data set that they answer.
        """

    def extract(self, response: str) -> str | None:
        """The answer in a response, None where there is none; equal answers have equal texts."""
        return None
