"""The models beside the policy. One exists where a column of it is read; one that trains has a loss of its own."""

from collections.abc import Container
from typing import NamedTuple

POLICY = "actor"  # the key of the model that samples and trains


class Role(NamedTuple):
    """A model beside the policy.

    Attributes:
        key: its node in the yaml.
        columns: what it writes, and the outputs of its forward that these are. It writes those that are read.
        head: of the network, and of its loss.
        loss: the option of the algorithm that holds its loss; None for a frozen model.
        follows: where it names the same model as the policy, it starts as the policy does.
    """

    key: str
    columns: dict[str, str]
    head: str
    loss: str | None
    follows: bool = True

    def writes(self, reads: Container[str]) -> dict[str, str]:
        """Those of its columns that something reads, and their outputs."""
        return {column: output for column, output in self.columns.items() if column in reads}


TEACHER = Role(
    "teacher",
    {"teacher_logprobs": "logprobs", "teacher_top_ids": "top_ids", "teacher_top_logprobs": "top_logprobs"},
    "lm",
    None,
    follows=False,
)
REFERENCE = Role("reference", {"ref_logprobs": "logprobs"}, "lm", None)
ROLES = (
    REFERENCE,
    Role("critic", {"values": "values"}, "value", "critic_loss"),
    Role("prm", {"prm_logprobs": "logprobs"}, "lm", "prm_loss"),
    TEACHER,
)
