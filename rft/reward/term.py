"""A reward term that is more than a function of one row, such as a model: a class by its `_target_`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Term(ABC):
    """What a weighted sum asks of a term. Making one is cheap: a config is checked with it.

    Attributes:
        reads: the fields of a row that it needs.
        extracts: whether it tells which answer it finds in a response.
    """

    reads: tuple[str, ...] = ()
    extracts: bool = False

    def check(self) -> None:
        """Looks for what it will load, before any model is.

        Raises:
            ValueError: names the key and the cure.
        """

    def place(self, device: torch.device) -> None:
        """Says where it is to compute, before it does so for the first time."""

    @abstractmethod
    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Sequence[float]:
        """A number for each response.

        Args:
            responses: N texts, without their prompts.
            rows: the N rows of the data set that they answer.
        """

    def extract(self, response: str) -> str | None:
        """The answer that it finds in a response; equal texts for equal answers."""
        return None
