"""Reports all mistakes of a config at once: every check whose parts exist runs, then one error has all messages."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any


class Problems(ValueError):
    """The messages of several checks.

    Attributes:
        messages: one for every mistake, each with its key and cure.
    """

    def __init__(self, messages: Iterable[str]) -> None:
        self.messages = list(messages)
        super().__init__("\n".join(self.messages))

    def __reduce__(self) -> tuple[type["Problems"], tuple[list[str]]]:
        return Problems, (self.messages,)  # pickled when it is sent to other ranks


class Checks:
    """Runs checks one after another and collects the messages of those that fail.

    Checks use parts, which `add` and `make` store by name. If a part could not be made, its message is stored, and the
    checks that need the part are skipped.

        checks = Checks()
        checks.add("metric", "accuracy")
        checks.make("reward", lambda: build_reward(node))  # checks.parts["reward"] is what the function returns
        checks.run(check_metric, "metric", "reward")       # calls check_metric(<the metric>, <the reward>)
        checks.end()                                       # raises Problems with all messages

    Attributes:
        messages: those of the checks that have failed so far.
        parts: the parts made so far, by name.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.parts: dict[str, Any] = {}
        self._failed: set[str] = set()

    def add(self, name: str, part: Any) -> None:
        """Stores a part."""
        self.parts[name] = part
        self._failed.discard(name)

    def fail(self, *names: str) -> None:
        """Marks parts as failed; the caller has stored the message."""
        self._failed |= set(names)

    def make(self, name: str, function: Callable[..., Any], *needs: str) -> None:
        """Stores what `function` returns as a part.

        Args:
            name: the name of the new part.
            function: takes the parts that it needs; raises a ValueError if something is wrong with them.
            needs: the names of these parts, in the order of the parameters.
        """
        self.fail(name)
        if self.has(*needs):
            try:
                self.add(name, function(*(self.parts[need] for need in needs)))
            except ValueError as error:
                self.messages += messages_of(error)

    def run(self, check: Callable[..., Iterable[str] | None], *needs: str) -> None:
        """Calls a check.

        Args:
            check: takes the parts that it needs; yields messages, or raises a ValueError, if something is wrong.
            needs: the names of these parts, in the order of the parameters.
        """
        if self.has(*needs):
            try:
                for message in check(*(self.parts[need] for need in needs)) or ():
                    self.messages.append(message)
            except ValueError as error:
                self.messages += messages_of(error)

    def attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` returns; None if it raises a ValueError, whose message is stored."""
        try:
            return function(*arguments)
        except ValueError as error:
            self.messages += messages_of(error)
            return None

    def has(self, *names: str) -> bool:
        """Whether none of these parts has failed."""
        return self._failed.isdisjoint(names)

    def end(self) -> None:
        """Raises Problems if there are messages."""
        if self.messages:
            raise Problems(self.messages)


def build_each(build: Callable[[str, Any], Any], nodes: Mapping[str, Any]) -> dict[str, Any]:
    """`build(name, node)` of every entry, by its name.

    Raises:
        Problems: the messages of all entries.
    """
    checks = Checks()
    found = {name: checks.attempt(build, name, node) for name, node in nodes.items()}
    checks.end()
    return found


def messages_of(error: ValueError) -> list[str]:
    """One message for every mistake."""
    return error.messages if isinstance(error, Problems) else [str(error)]
