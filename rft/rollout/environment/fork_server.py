"""Forks a process for every environment: `python -m rft.rollout.environment.fork_server <fd>`, started by `Processes`.

The server imports and prepares the classes of the run once, and builds the object of an agent once. It starts no
threads, so that a fork takes milliseconds. Each message names a class and carries one end of a socket, over which the
new process gets calls from the run and answers in JSON. The processes end when the run closes the other end, or dies.
"""

import array
import asyncio
import ctypes
import gc
import inspect
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from rft.registry import Target

PR_SET_PDEATHSIG = 1
LONGEST = 2**20  # bytes of a message to or from the server
READY = b"+"  # the message of a server that can fork
Call = tuple[str, tuple[Any, ...], dict[str, Any], int]  # method, arguments, most characters of a text that it returns


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
        prepare(self._target)
        if isinstance(self._target.factory, type) and is_agent(self._target.factory):
            self._object = self._target.build()

    def call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What a method returns; `reset` builds the object first. An agent has an event loop of its own, since its
        function may block."""
        if is_agent(self._target.factory):
            found = self._play(options)
            return asyncio.run(found) if inspect.iscoroutine(found) else found
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


def prepare(target: Target) -> None:
    """Calls the class method `prepare` of an environment with its options, if there is one."""
    methods = dict(inspect.getmembers(target.factory, inspect.ismethod))
    if "prepare" in methods:
        methods["prepare"](**target.options)


def serve(line: socket.socket, classes: Mapping[str, Hosted]) -> None:
    """Forks processes until the run closes the line.

    Args:
        classes: by name.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes processes that have ended
    while True:
        message, ancillary, _, _ = line.recvmsg(LONGEST, socket.CMSG_SPACE(array.array("i").itemsize))
        if not message:
            return
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        if os.fork() == 0:
            try:
                line.close()
                work(Connection(descriptors[0]), classes[message.decode()])
            finally:
                os._exit(1)
        os.close(descriptors[0])


def work(line: Connection, hosted: Hosted) -> None:
    """Answers the calls of one episode: `[value, null, null]`, or `[null, class of the error, its text]`."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what an environment prints is not the output of the run
        os.dup2(nothing, stream)
    threading.Thread(target=_end_with, args=[line.fileno()], daemon=True).start()
    loop = asyncio.new_event_loop()
    while True:
        try:
            method, arguments, options, most = line.recv()
        except EOFError:
            os._exit(0)
        found: list[Any]
        try:
            value = hosted.call(method, arguments, options)
            found = [cut(loop.run_until_complete(value) if inspect.isawaitable(value) else value, most), None, None]
            answer = json.dumps(found, default=str).encode(errors="surrogatepass")
        except (Exception, SystemExit) as error:  # noqa: BLE001  # an environment may raise anything
            answer = json.dumps([None, type(error).__name__, str(error)[:most]]).encode()
        line.send_bytes(answer)


def _end_with(descriptor: int) -> None:
    """Ends the process and its children once the run has closed the line, also while a method hangs."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)
    hung_up.poll()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Imports and prepares the classes that the run names, and serves."""
    line = socket.socket(fileno=int(sys.argv[1]))
    nodes: dict[str, Any] = json.loads(line.recv(LONGEST))
    classes = {name: Hosted(Target(node, f"environment.classes.{name}")) for name, node in nodes.items()}
    for name, hosted in classes.items():
        try:
            hosted.prepare()
        except (ValueError, OSError) as error:
            line.send(f"environment.classes.{name}: {error}".encode()[:LONGEST])
            return
    # After the objects are built, whose packages may set handlers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the run ends the line when it is interrupted
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # a collection in a forked process would write to every page that it shares
    line.send(READY)
    serve(line, classes)


if __name__ == "__main__":
    main()
