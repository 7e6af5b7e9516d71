"""All errors of a config at once: later checks run after one has failed; those that depend on it are skipped."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

Made = TypeVar("Made")


class Problems(ValueError):
    """What several checks have to say.

    Attributes:
        messages: one for every mistake, each with its key and cure.
    """

    def __init__(self, messages: Iterable[str]) -> None:
        self.messages = list(messages)
        super().__init__("\n".join(self.messages))

    def __reduce__(self) -> tuple[type["Problems"], tuple[list[str]]]:
        return Problems, (self.messages,)  # on its way to other ranks


class Skipped(AttributeError):
    """A check asks for what could not be made; why that is has been said."""


class Partial:
    """An object some of whose attributes are missing, because something is wrong with them; it holds no items."""

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    if not TYPE_CHECKING:  # for the type checker it is what it stands for

        def __getattr__(self, name: str) -> Any:
            raise Skipped(name)

        def __len__(self) -> int:
            raise Skipped("length")

        def __iter__(self) -> Iterator[Any]:
            raise Skipped("items")


class Checks:
    """Collects what checks have to say.

    Attributes:
        messages: so far.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Notes the ValueError that ends the block; leaves the block where it asks for what is missing."""
        try:
            yield
        except Skipped:
            pass
        except ValueError as error:
            self.messages += messages_of(error)

    def attempt(self, make: Callable[..., Made], *arguments: Any) -> Made:
        """What `make` returns, or, where something is wrong with it, an object that skips the checks that use it."""
        with self():
            return make(*arguments)
        return cast(Made, Partial())

    def end(self) -> None:
        """Raises Problems where there are any."""
        if self.messages:
            raise Problems(self.messages)


def messages_of(error: ValueError) -> list[str]:
    """One message for every mistake."""
    return error.messages if isinstance(error, Problems) else [str(error)]
