"""The models beside the policy, each a role in the table `ROLES`. A role is one registration.

A model exists in a run if something reads one of its columns. A role of your own is registered in a plugin; it adds a
key to the root of the config, and the option of its loss to `algorithm`:

    ROLES.register(Role("judge", {"judge_logprobs": "logprobs"}, head="lm", loss=None, follows=False))
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass

POLICY = "actor"  # the key of the model that samples and trains


@dataclass(frozen=True)
class Role:
    """A model beside the policy.

    Attributes:
        key: its node in the yaml.
        columns: the columns that it can write, and the outputs of the model that these are.
        head: of the network, and of its loss.
        loss: the option of the algorithm that holds its loss; None for a frozen model.
        follows: where it names the same model as the policy, it starts as a copy of the policy. A model that neither
            follows nor trains may run outside of this process.
    """

    key: str
    columns: dict[str, str]
    head: str
    loss: str | None
    follows: bool = True

    def writes(self, reads: Container[str]) -> dict[str, str]:
        """Those of its columns that are read, and their outputs."""
        return {column: output for column, output in self.columns.items() if column in reads}


class Roles:
    """Roles by their keys, in the order in which a step computes their columns."""

    def __init__(self) -> None:
        self._roles: dict[str, Role] = {}

    def register(self, role: Role) -> Role:
        """Adds a role. The same role may be registered again.

        Raises:
            ValueError: its key, a column or its loss option belongs to another role.
        """
        if self._roles.get(role.key, role) != role or role.key == POLICY:
            raise ValueError(f"role {role.key!r} is registered twice; give one of them another key")
        for other in self._roles.values():
            if other.key != role.key and (both := other.columns.keys() & role.columns.keys()):
                raise ValueError(f"role {role.key!r}: {min(both)!r} is a column of {other.key!r}; give it another name")
            if other.key != role.key and role.loss is not None and other.loss == role.loss:
                raise ValueError(f"role {role.key!r}: {role.loss!r} is the loss of {other.key!r}; give it another name")
        self._roles[role.key] = role
        return role

    def __iter__(self) -> Iterator[Role]:
        return iter(tuple(self._roles.values()))

    def __getitem__(self, key: str) -> Role:
        return self._roles[key]

    def __contains__(self, key: str) -> bool:
        return key in self._roles


ROLES = Roles()
REFERENCE = ROLES.register(Role("reference", {"ref_logprobs": "logprobs"}, "lm", None))
ROLES.register(Role("critic", {"values": "values"}, "value", "critic_loss"))
ROLES.register(Role("prm", {"prm_logprobs": "logprobs"}, "lm", "prm_loss"))
ROLES.register(
    Role(
        "teacher",
        {"teacher_logprobs": "logprobs", "teacher_top_ids": "top_ids", "teacher_top_logprobs": "top_logprobs"},
        "lm",
        None,
        follows=False,
    )
)
