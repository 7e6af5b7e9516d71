"""What code of the user gets of a row, and names that data cannot have."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.batch.row_fields import EPISODE_FIELD, check_names, own_copy, row_of_user

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sets(st.integers(), max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def containers(value):
    """What can be changed in a value, at every depth."""
    if isinstance(value, list | dict | set):
        yield id(value)
    if isinstance(value, list | dict | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_a_copy_is_equal_and_shares_nothing_that_can_be_changed(value):
    copied = own_copy(value)
    assert copied == value and type(copied) is type(value)
    assert {*containers(value)}.isdisjoint(containers(copied))


def test_other_objects_are_shared():
    image = object()
    assert own_copy({"images": [image]})["images"][0] is image


def test_functions_see_the_record_of_an_episode_unless_the_data_have_the_field():
    record = {"turns": 2, "messages": []}
    played = row_of_user({"prompt": "p", EPISODE_FIELD: record})
    assert played["episode"] == record and played["episode"]["messages"] is not record["messages"]
    assert row_of_user({"episode": 5, EPISODE_FIELD: record})["episode"] == 5
    assert row_of_user({"prompt": "p"}) == {"prompt": "p"}


def test_a_field_with_the_name_of_an_entry_of_the_run_is_refused():
    check_names({"episode": 1, "unscored": 2, "prompt_opens": "<think>"})
    with pytest.raises(ValueError, match=r"^the field 'rft:episode' begins with rft:.*rename it$"):
        check_names({"prompt": "p", EPISODE_FIELD: {}})
