"""A reward term that isolated workers compute: `call.workers=sandbox`."""

from collections.abc import Mapping
from typing import Any

from rft.reward.call import CallOptions
from rft.reward.runners import Runner
from rft.reward.sandbox.workers.pool import IsolatedPool, IsolatedTerm
from rft.reward.term import Term
from rft.reward.thought import ReadingOptions


def isolated(
    name: str, node: Mapping[str, Any], key: str, options: CallOptions, reading: ReadingOptions
) -> tuple[Term, Runner]:
    """A term, and its workers. Arguments as in `rft.reward.call.build`."""
    assert options.deadline_s is not None, "a call in a sandbox has a deadline"
    pool = IsolatedPool(name, node, key, options.concurrency, options.deadline_s, options.sandbox)
    return IsolatedTerm(node, key, pool), pool
