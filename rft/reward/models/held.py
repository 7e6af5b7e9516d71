"""The abstract class of what holds the model of a reward term."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from transformers import PreTrainedModel


class HeldModel(ABC):
    """Holds a model between its uses."""

    def forwards(self, own: int) -> int:
        """The number of forwards that this rank computes in the next use; those beyond `own` have no rows.

        Args:
            own: forwards of the rows of this rank.
        """
        return own

    def forward_pass(self) -> AbstractContextManager[None]:
        """The block is one forward of the model."""
        return nullcontext()

    @abstractmethod
    def loaded(self) -> AbstractContextManager[PreTrainedModel]:
        """The block computes with the model, on the device of the run."""
