"""What an environment of the user's is, where it lives: in the process of the run, or in a worker.

A worker serves one environment. The fork server prepares the classes of the run once, and builds the object of an agent
once.
"""

import asyncio
import inspect
import json
from collections.abc import Mapping
from typing import Any

from rft.registry import Target


def as_text(value: Any) -> str:
    """The output of a tool as the model reads it: a text, bytes as UTF-8, JSON of other values."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def cut(value: Any, most: int) -> Any:
    """What a method returned; a text, or bytes as a text, of at most `most` characters."""
    return as_text(value[:most]) if isinstance(value, str | bytes) else value


def is_agent(factory: Any) -> bool:
    """Whether a yaml names an agent: a function, or a class with `run` in the place of `reset`."""
    return not isinstance(factory, type) or ("run" in dir(factory) and "reset" not in dir(factory))


class Hosted:
    """What an environment of the user's is, where it lives: the object of a class, or the function of an agent.

    Args:
        target: builds the object, or is the function.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._object: Any = None

    def prepare(self) -> None:
        """Prepares the class, and builds the object of an agent, which all its episodes begin with."""
        factory = self._target.factory
        self._object = prepare(self._target, build=isinstance(factory, type) and is_agent(factory))

    def call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What a method returns; `reset` builds the object first. An agent has an event loop of its own, since its
        function may block."""
        if is_agent(self._target.factory):
            reward = self._play(options)
            return asyncio.run(reward) if inspect.iscoroutine(reward) else reward
        if method == "reset":
            self._object = self._target.build()
        return getattr(self._object, method)(*arguments, **options)

    def _play(self, options: dict[str, Any]) -> Any:
        if not isinstance(self._target.factory, type):
            return self._target.build(**options)
        if self._object is None:
            self._object = self._target.build()
        takes = inspect.signature(self._object.run).parameters
        return self._object.run(**{name: value for name, value in options.items() if name in takes})


def prepare(target: Target, build: bool) -> Any:
    """Calls the class method `prepare` of an environment with its options, if there is one.

    Returns:
        An object of the class, with `build`; else None.

    Raises:
        ValueError: the class cannot be prepared or built; names the key.
    """
    methods = dict(inspect.getmembers(target.factory, inspect.ismethod))
    try:
        if "prepare" in methods:
            methods["prepare"](**target.options)
        return target.build() if build else None
    except (ValueError, OSError) as error:
        raise ValueError(f"{target.key}: {error}") from error


class Host:
    """The work of a worker: calls methods of one environment.

    Args:
        classes: of the run, by name.
    """

    def __init__(self, classes: Mapping[str, Hosted]) -> None:
        self._classes = classes
        self._loop: asyncio.AbstractEventLoop | None = None  # of the process, for all calls

    def __call__(self, name: str, method: str, arguments: tuple[Any, ...], options: dict[str, Any], most: int) -> bytes:
        """`[value, null, null]` as JSON, or `[null, class of the error, its text]`.

        Args:
            name: of the class.
            method, arguments, options: of the call.
            most: characters of a text that it returns; the rest is cut.
        """
        self._loop = self._loop or asyncio.new_event_loop()
        try:
            value = self._classes[name].call(method, arguments, options)
            if inspect.isawaitable(value):
                value = self._loop.run_until_complete(value)
            return json.dumps([cut(value, most), None, None], default=str).encode(errors="surrogatepass")
        except (Exception, SystemExit) as error:  # noqa: BLE001  # an environment may raise anything
            return json.dumps([None, type(error).__name__, str(error)[:most]]).encode()


def host(nodes: Mapping[str, Any]) -> Host:
    """Imports and prepares classes, in the fork server.

    Args:
        nodes: the yaml nodes of the classes, by name.

    Raises:
        ValueError: a class cannot be prepared; names the key.
    """
    classes = {name: Hosted(Target(node, f"environment.classes.{name}")) for name, node in nodes.items()}
    for hosted in classes.values():
        hosted.prepare()
    return Host(classes)
