"""What a source of batches is given, and what it checks its options against."""

from typing import Any

from rft.data.base import CheckContext, SourceContext
from rft.distributed import World


def source_context(world: World, encoder: Any, rows: Any, prompts: int, seed: int, **changes: Any) -> SourceContext:
    """What a source of given texts is given; the algorithm reads nothing of note."""
    shared = {"world": world, "seed": seed, "encoder": encoder, "rows": rows, "prompts": prompts}
    return SourceContext(**{"columns": (), "shuffle": True, **shared, **changes})


def check_context(**changes: Any) -> CheckContext:
    """A run that no source objects to."""
    shared = {"key": "algorithm.source", "prompts": 4, "group_size": 4, "reads": ()}
    shared |= {"max_new_tokens": 6, "cap_key": "rollout.max_new_tokens", "shuffle": True}
    return CheckContext(**{**shared, "terms": ("right",), "streaming": None, "mixture": False, **changes})
