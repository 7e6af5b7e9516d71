"""Where the calls of a reward term run: in the main thread, or beside it, see `rft.reward.async_runners`."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from rft.errors import FunctionError, naming
from rft.reward.term import RowTerm, Term, Unscored, catching, is_tensor, values_of

Rows = Sequence[Mapping[str, Any]]
Outcomes = list[Any]  # of the responses of one call: a value, or `Unscored`


class Runner(ABC):
    """Runs the calls of one term.

    Attributes:
        beside: calls run while the main thread does other work, so they may start before all responses are sampled.
    """

    beside: ClassVar[bool] = True

    def __init__(self) -> None:
        self._submitting = threading.Lock()

    def submit(self, responses: Sequence[str], rows: Rows) -> Future[Outcomes]:
        """Starts one call; in an event loop or in a worker it ends where its future is cancelled. Any thread may call
        this: the calls of a term start one after the other."""
        with self._submitting:
            return self._submit(responses, rows)

    @abstractmethod
    def _submit(self, responses: Sequence[str], rows: Rows) -> Future[Outcomes]:
        """Starts one call, while no other one of the term starts."""

    def close(self) -> None:
        """Ends the threads and processes."""


class InlineRunner(Runner):
    """Runs a call at once, in the thread that submits it. One call runs at a time.

    Args:
        term: of the calls.
        name: of the term.
    """

    beside: ClassVar[bool] = False

    def __init__(self, term: Term, name: str) -> None:
        super().__init__()
        self._term = term
        self._name = name

    def _submit(self, responses: Sequence[str], rows: Rows) -> Future[Outcomes]:
        done: Future[Outcomes] = Future()
        done.set_result(call(self._term, self._name, responses, rows))
        return done


def call(term: Term, name: str, responses: Sequence[str], rows: Rows) -> Outcomes:
    """The outcomes of one call in this process; arguments and errors as in `outcomes`."""
    returned: Any = None
    with catching() as caught:
        if isinstance(term, RowTerm):  # its function names itself in an error
            returned = values_of(term, responses, rows)
        else:
            with naming(f"the reward term {name!r}", type(term).values):
                returned = values_of(term, responses, rows)
    return outcomes(caught.failure or returned, responses, name)


def outcomes(found: Any, responses: Sequence[str], name: str) -> Outcomes:
    """One outcome for each response of a call.

    Args:
        found: what the term returned, or a `Failure` of the call.
        responses: of the call.
        name: of the term.

    Raises:
        FunctionError: the term returned more or fewer values than there are responses.
    """
    if isinstance(found, Unscored):
        return [found] * len(responses)
    several = is_tensor(found) or (isinstance(found, Sequence) and not isinstance(found, str))
    values = list(found) if several else [found]
    if len(values) != len(responses):
        raise FunctionError(f"the reward term {name!r} gave {len(values)} scores for {len(responses)} responses")
    return values
