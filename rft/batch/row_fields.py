"""Names of entries that are added to the fields of a row, and what functions of the user get of a row. Without torch:
workers of rewards import it.
"""

from collections.abc import Mapping
from typing import Any

OWN = "rft:"  # begins the names of entries of the run, which no field of the data has
EPISODE_FIELD = f"{OWN}episode"  # the record of an episode
UNSCORED_FIELD = f"{OWN}unscored"  # {term: reason}
PROMPT_OPENS = "prompt_opens"  # the mark of the thought in which the rendered prompt ends; data may have it, too
EPISODE = "episode"  # the record in a line of `trajectories/`; its "term" among the unscored if the episode failed
UNSCORED = "unscored"  # the reasons in such a line, and in names of metrics


def check_names(row: Mapping[str, Any]) -> None:
    """Refuses a row of the data with a field that has the name of an entry of the run.

    Raises:
        ValueError: names the field.
    """
    for name in row:
        if name.startswith(OWN):
            raise ValueError(f"the field {name!r} begins with {OWN}, as only entries of the run do; rename it")


def row_of_user(row: Mapping[str, Any]) -> dict[str, Any]:
    """The copy of a row that code of the user gets, see `own_copy`. It has the record of an episode as the field
    `episode` too, unless the data have a field of this name."""
    copied = {name: own_copy(value) for name, value in row.items()}
    return {EPISODE: copied[EPISODE_FIELD], **copied} if EPISODE_FIELD in copied else copied


def own_copy(value: Any) -> Any:
    """A copy of a value that code of the user gets, so that what the code changes stays its own.

    Dicts, lists, tuples and sets are copied at every depth. Other objects, such as opened media, are shared.
    """
    if isinstance(value, dict):
        return {name: own_copy(item) for name, item in value.items()}
    if isinstance(value, list):
        return [own_copy(item) for item in value]
    if isinstance(value, set):
        return set(value)
    return tuple(map(own_copy, value)) if type(value) is tuple else value  # a named tuple is no plain one
