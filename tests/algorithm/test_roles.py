"""A role is registered once, with columns and a loss that are its own."""

import pytest

from rft.algorithm.options import AlgorithmOptions, options_with_roles
from rft.algorithm.roles import ROLES, Role, Roles


@pytest.fixture
def roles():
    table = Roles()
    table.register(Role("reference", {"ref_logprobs": "logprobs"}, "lm", None))
    table.register(Role("critic", {"values": "values"}, "value", "critic_loss"))
    return table


def test_they_come_in_the_order_of_their_registration(roles):
    judge = roles.register(Role("judge", {"judge_logprobs": "logprobs"}, "lm", None, follows=False))
    assert [role.key for role in roles] == ["reference", "critic", "judge"]
    assert roles["judge"] is judge and "judge" in roles
    assert "teacher" not in roles


def test_the_same_role_is_registered_again_where_a_plugin_is_imported_anew(roles):
    roles.register(Role("critic", {"values": "values"}, "value", "critic_loss"))
    assert [role.key for role in roles] == ["reference", "critic"]


@pytest.mark.parametrize(
    ("role", "said"),
    [
        (Role("critic", {"other": "values"}, "value", None), r"^role 'critic' is registered twice"),
        (Role("actor", {"other": "values"}, "value", None), r"^role 'actor' is registered twice"),
        (Role("judge", {"values": "logprobs"}, "lm", None), r"^role 'judge': 'values' is a column of 'critic'"),
        (
            Role("judge", {"x": "logprobs"}, "lm", "critic_loss"),
            r"^role 'judge': 'critic_loss' is the loss of 'critic'",
        ),
    ],
)
def test_what_belongs_to_another_role_is_refused(roles, role, said):
    with pytest.raises(ValueError, match=said):
        roles.register(role)
    assert len(list(roles)) == 2


def test_it_writes_what_is_read():
    role = Role("teacher", {"a": "logprobs", "b": "top_ids"}, "lm", None)
    assert role.writes({"b", "c"}) == {"b": "top_ids"} and role.writes(()) == {}


def test_the_loss_of_a_role_is_an_option_of_the_algorithm(plugins_forgotten):
    assert options_with_roles() is AlgorithmOptions, "those of the package stand there already"
    ROLES.register(Role("judge", {"judge_logprobs": "logprobs"}, "lm", "judge_loss"))
    kind = options_with_roles()
    assert issubclass(kind, AlgorithmOptions) and kind.__dataclass_fields__["judge_loss"].default is None
