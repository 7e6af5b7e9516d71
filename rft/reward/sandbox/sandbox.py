"""Runs programs in the sandbox: starts the fork server, sends it programs, and reads their output up to a limit."""

import json
import logging
import os
import secrets
import select
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from rft.reward.sandbox.isolation.messages import HEAD, framed
from rft.reward.sandbox.options import Layer
from rft.reward.sandbox.programs import Limits, Outcome, SandboxOptions, Status
from rft.waits import waiting
from rft.worker.child_process import ChildProcess

BOOT = "import sys; sys.path.append(sys.argv[1]); from isolation.server import main; main()"
LAYERS: tuple[Layer, ...] = get_args(Layer)
GRACE_S = 60.0  # beyond a program's seconds, until the fork server counts as stuck
CHUNK = 65536
CURES = {
    "namespaces": "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container a seccomp profile that allows unshare and mount)",
    "network": "allow network namespaces (sysctl user.max_net_namespaces)",
    "landlock": "use Linux 5.13 or later with `landlock` in the kernel parameter lsm=",
    "seccomp": "use a kernel with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64",
}
FORKS = "import os\ntry:\n    os.fork()\nexcept BlockingIOError:\n    print('limited')\n"


class SandboxFailed(OSError):
    """The fork server could not be started, or does not answer."""


class Sandbox:
    """Runs Python programs in processes of their own that the kernel isolates. Linux only.

    Args:
        options: the layers that it needs, and the limits.
        key: its place in the yaml, for messages.
        layers: those that it uses where the kernel has them.
        shown: further files and folders that programs may read.
    """

    def __init__(
        self,
        options: SandboxOptions,
        key: str = "sandbox",
        layers: Sequence[Layer] = LAYERS,
        shown: Sequence[str] = (),
    ) -> None:
        self.options = options
        self._key = key
        self._layers = list(layers)
        self._shown = list(shown)
        self._lock = threading.Lock()
        self._server: ChildProcess | None = None
        self._jobs: socket.socket | None = None

    def check(self) -> None:
        """Starts the fork server, which probes every layer, and runs two programs.

        Raises:
            ValueError: a required layer is not available, or the kernel does not limit processes; names the layer, the
                errno and the cure.
        """
        if not sys.platform.startswith("linux"):
            raise ValueError(f"{self._key}: programs are isolated on Linux alone; score them on a machine with Linux")
        for number, folder in enumerate(self.options.packages):
            if not Path(folder).is_dir():
                raise ValueError(f"{self._key}.packages[{number}]={folder}: there is no such folder; name another")
        try:
            with self._lock:
                missing = self._start()
        except SandboxFailed as error:
            raise ValueError(f"{self._key}: {error}") from error
        if missing:
            names = ", ".join(f"{layer} ({missing[layer]})" for layer in missing)
            logging.getLogger(__name__).warning("%s runs programs without these layers: %s", self._key, names)
        self._check_runs()

    def run(self, program: str, stdin: str, limits: Limits | None = None) -> Outcome:
        """Runs a program to its end.

        Args:
            program: Python source.
            stdin: its input.
            limits: instead of those of the options.
        """
        limits = self.options.limits if limits is None else limits
        text = memoryview(stdin.encode(errors="surrogateescape"))
        (reader, feed), (stdout, out), (stderr, err) = (os.pipe() for _ in range(3))
        job = _Job([feed, stdout, stderr], limits)
        try:
            try:
                spawned = self.spawn(program, limits, (reader, out, err))
            finally:
                for descriptor in (reader, out, err):
                    os.close(descriptor)
            return job.run(spawned, text)
        except (SandboxFailed, ValueError) as error:
            return Outcome("refused", "", "", 0.0, str(error))
        except OSError as error:
            return Outcome("refused", "", "", 0.0, f"the supervisor does not answer: {error}")
        finally:
            job.close()

    def run_many(self, jobs: Sequence[tuple[str, str]], limits: Limits | None = None) -> list[Outcome]:
        """Runs pairs (program, stdin), `workers` at the same time; the outcomes in the order of the pairs."""
        with ThreadPoolExecutor(self.options.workers) as pool:
            return list(pool.map(lambda job: self.run(job[0], job[1], limits), jobs))

    def close(self) -> None:
        """Ends the fork server and every program that runs."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._jobs is not None:
            self._jobs.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._jobs = self._server = None

    def __del__(self) -> None:
        self.close()

    def _start(self) -> dict[str, str]:
        """Starts the fork server; returns the layers that are not available and not required, each with the reason.

        The caller holds the lock.

        Raises:
            ValueError: a required layer is not available.
            SandboxFailed: the server does not start.
        """
        self._end()
        ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = str(Path(__file__).parent)
        given = json.dumps({"packages": self.options.packages, "shown": self._shown, "layers": self._layers})
        # -P and -S: nothing but the standard library is imported; the hash seed makes the order of sets repeatable.
        command = [sys.executable, "-P", "-S", "-B", "-c", BOOT, folder, str(other.fileno()), given]
        with other:
            self._server = ChildProcess(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                start_new_session=True,
            )
        self._jobs = ours
        ours.settimeout(GRACE_S)  # of what it sends now, and of each program that it takes later
        try:
            with waiting(f"{self._key}: the run waits for the fork server of the sandbox"):
                probe = json.loads(ours.recv(CHUNK)[HEAD:])
        except (OSError, ValueError) as error:
            self._end()
            raise SandboxFailed(
                f"the fork server of the sandbox did not start ({error!r}); see its traceback"
            ) from error
        lacking: dict[str, str] = {layer: problem[1] for layer in self._layers if (problem := probe[layer]) is not None}
        lacking |= {layer: "switched off" for layer in LAYERS if layer not in self._layers}
        for layer in LAYERS:
            if layer in lacking and (layer == "namespaces" or layer in self.options.require):
                self._end()
                cure = CURES[layer]
                if layer != "namespaces":
                    cure += f", or take it out of {self._key}.require, and programs run without it"
                raise ValueError(f"{self._key}.require: the layer {layer} is not available: {lacking[layer]}; {cure}")
        return lacking

    def _check_runs(self) -> None:
        """Runs a program that prints, and one that starts more processes than it may."""
        outcome = self.run("print(sum(map(int, input().split())))", "1 2")
        if (outcome.status, outcome.stdout) != ("ok", "3\n"):
            said = f"{outcome.status} {outcome.reason} {outcome.stderr}".strip()
            raise ValueError(f"{self._key}: a program that adds two numbers fails in the sandbox: {said}")
        limits = Limits(**asdict(self.options.limits) | {"processes": 1})
        outcome = self.run(FORKS, "", limits)
        if (outcome.status, outcome.stdout) != ("ok", "limited\n"):
            raise ValueError(
                f"{self._key}.limits.processes: the kernel does not limit the processes of a program "
                f"({outcome.status}); use Linux 5.14 or later"
            )

    def spawn(self, program: str, limits: Limits, streams: tuple[int, int, int]) -> "Spawned":
        """Starts a program that runs while the caller uses the other ends of its streams.

        Args:
            program: Python source.
            limits: of it.
            streams: descriptors of its stdin, stdout and stderr; the caller keeps and closes its copies.

        Raises:
            OSError: the sandbox does not start it.
            ValueError: a required layer is not available.
        """
        return Spawned(self._hand_over(streams), program, limits)

    def _hand_over(self, streams: tuple[int, int, int]) -> socket.socket:
        """Sends the fork server the streams of a job, and starts it where there is none; the control socket.

        Raises:
            SandboxFailed: the fork server does not start, or takes no job.
            ValueError: a required layer is not available.
        """
        control, other = socket.socketpair()
        try:
            with other, self._lock:
                if self._server is None or self._server.poll() is not None or self._jobs is None:
                    self._start()
                assert self._jobs is not None, "the fork server has just been started"
                socket.send_fds(self._jobs, [b"job"], [other.fileno(), *streams])
        except (OSError, ValueError) as error:
            control.close()
            if isinstance(error, ValueError | SandboxFailed):
                raise
            raise SandboxFailed(f"the fork server of the sandbox takes no program: {error}") from error
        return control


def readable(descriptor: int, seconds: float) -> bool:
    """Waits until something can be read, or the other end is closed; False after so many seconds without."""
    ready = select.poll()  # unlike `select`, also for descriptors above 1023
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(1000 * seconds))


class Spawned:
    """A program that has been started; see `Sandbox.spawn`.

    Args:
        control: the socket to the supervisor.
        program, limits: see `Sandbox.spawn`.

    Attributes:
        control: as given. When it can be read, the supervisor has ended the program.

    Raises:
        OSError: the supervisor does not take the program.
    """

    def __init__(self, control: socket.socket, program: str, limits: Limits) -> None:
        self.control = control
        self._nonce = secrets.token_hex(16)
        control.settimeout(GRACE_S)
        for value in (asdict(limits) | {"program": program}, self._nonce):
            control.sendall(framed(json.dumps(value).encode()))

    def end(self, patience_s: float = 0.0) -> dict[str, Any]:
        """Ends every process of the program; its verdict: status, reason and seconds.

        Args:
            patience_s: the program may end by itself for so long.
        """
        with self.control:
            try:
                if not readable(self.control.fileno(), patience_s):
                    self.control.shutdown(socket.SHUT_WR)
                said = bytearray()
                while part := self.control.recv(CHUNK):
                    said += part
                if len(said) < HEAD:
                    raise OSError("it ended without a verdict")
                verdict: dict[str, Any] = json.loads(said[HEAD:])
                started = verdict["nonce"] != "" or verdict["status"] != "refused"
                if started and verdict["nonce"] != self._nonce:
                    raise OSError("its verdict has another nonce")
                return verdict
            except OSError as error:
                return {"status": "refused", "reason": f"the supervisor does not answer: {error}", "seconds": 0.0}


class _Job:
    """The trainer's side of one program: writes its input, reads its output up to a limit, and the verdict.

    Args:
        pipes: the write end of stdin, and the read ends of stdout and stderr.
        limits: of the program.
    """

    def __init__(self, pipes: list[int], limits: Limits) -> None:
        self._pipes = pipes
        self._limits = limits
        self._most = limits.output_kib * 1024
        self._output = {pipes[1]: bytearray(), pipes[2]: bytearray()}
        self._ended = False
        self._selector = selectors.DefaultSelector()

    def run(self, spawned: Spawned, feed: memoryview) -> Outcome:
        """The outcome of the program, whose input is `feed`.

        Raises:
            OSError: there is no verdict within the time of the program.
        """
        with spawned.control:
            self._exchange(spawned.control, feed)
            verdict = spawned.end()
        exceeded = any(len(part) > self._most for part in self._output.values())
        status: Status = "output" if exceeded else verdict["status"]
        stdout, stderr = (part[: self._most].decode(errors="replace") for part in self._output.values())
        return Outcome(status, stdout, stderr, verdict["seconds"], verdict["reason"])

    def close(self) -> None:
        """Closes the pipes."""
        self._selector.close()
        for descriptor in self._pipes:
            os.close(descriptor)

    def _exchange(self, control: socket.socket, feed: memoryview) -> None:
        """Writes the input and reads the output until the supervisor has ended the program."""
        deadline = time.monotonic() + self._limits.seconds + GRACE_S
        stdin, *outputs = self._pipes
        for descriptor in self._pipes:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_WRITE if descriptor == stdin else selectors.EVENT_READ)
        self._selector.register(control, selectors.EVENT_READ)
        while True:
            if time.monotonic() > deadline:
                raise OSError("no verdict within the time of the program")
            for key, _ in self._selector.select(1.0):
                if key.fileobj is control:
                    for descriptor in outputs:  # what the program wrote last
                        self._read(descriptor, control)
                    return
                if key.fileobj == stdin:
                    feed = self._feed(stdin, feed)
                elif not self._read(key.fd, control):
                    self._selector.unregister(key.fd)

    def _feed(self, stdin: int, feed: memoryview) -> memoryview:
        try:
            feed = feed[os.write(stdin, feed) :] if feed else feed
        except BlockingIOError:
            return feed
        except BrokenPipeError:  # the program has closed its input
            feed = feed[:0]
        if not feed:
            self._selector.unregister(stdin)
            os.close(stdin)
            self._pipes.remove(stdin)
        return feed

    def _read(self, descriptor: int, control: socket.socket) -> bool:
        """Reads what a pipe has; False at its end, or once the limit is passed, which ends the program."""
        output = self._output[descriptor]
        try:
            while len(output) <= self._most:
                part = os.read(descriptor, min(CHUNK, self._most + 1 - len(output)))
                output += part
                if not part:
                    return False
        except BlockingIOError:
            return True
        if not self._ended:
            self._ended = True
            control.shutdown(socket.SHUT_WR)
        return False
