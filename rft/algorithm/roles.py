"""The models beside the policy. One exists where a column of it is read; one that trains has a loss of its own."""

from typing import NamedTuple


class Role(NamedTuple):
    """A model beside the policy.

    Attributes:
        key: its node in the yaml.
        column: what it writes.
        output: what its forward computes for that.
        head: of the network, and of its loss.
        loss: the option of the algorithm that holds its loss; None for a frozen model.
    """

    key: str
    column: str
    output: str
    head: str
    loss: str | None


ROLES = (
    Role("reference", "ref_logprobs", "logprobs", "lm", None),
    Role("critic", "values", "values", "value", "critic_loss"),
    Role("prm", "prm_logprobs", "logprobs", "lm", "prm_loss"),
)
