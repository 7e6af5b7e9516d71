"""Spreads groups of questions over servers: least loaded first, every answer taken once, whatever a server does.

A group, such as the samples of one prompt, goes to one server, which then computes the prompt once. How much a server
is given at once is halved where it is busy or late, and grows again with every answer. When no group is left to hand
out, an idle server is given the oldest group of another one too, and the first answers win.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from rft.remote.http_client import LOOK_S, RequestFailed, ServerClient, deadline
from rft.remote.requests import Assignment, RequestGroup, SampleRequest, Server
from rft.rollout.server.options import RetryPolicy

TICK = 0.1  # seconds between looks at groups that are late
LATE = 2.0  # times the mean of the groups that are done,
LATE_S = 1.0  # and no less than so many seconds


class LoadBalancer:
    """One round of groups.

    Args:
        who, what, wanted: who asks for what of which servers, for messages and logs.
        servers: what is learnt about them is kept from round to round.
        look: asks a server whether it can be asked: None, or why not.
        options: cap on a server's window, failures of a group that are put up with, deadlines.
        key: of the options in the yaml.
        counts: receives `retries` and `hedged`, in groups.
        progress: called with the number of answers that are there.
    """

    def __init__(
        self,
        who: str,
        what: str,
        wanted: str,
        servers: list[Server],
        look: Callable[[ServerClient], Awaitable[str | None]],
        options: RetryPolicy,
        key: str,
        counts: Counter[str],
        progress: Callable[[int], None] | None,
    ) -> None:
        self._who = who
        self._what = what
        self._wanted = wanted
        self._servers = servers
        self._ask = look
        self._options = options
        self._key = key
        self._counts = counts
        self._progress = progress
        self._stirred = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue: deque[RequestGroup] = deque()
        self._begun: set[RequestGroup] = set()
        self._seconds: list[float] = []  # that groups took
        self._done = 0

    async def run(self, asked: Sequence[Sequence[SampleRequest]]) -> list[list[Any]]:
        """The answers, in the order of the questions.

        Args:
            asked: per group, its questions.

        Raises:
            Failed: a group has failed too often; names the server.
            TimeoutError: no server is ready within its deadline; names them all.
        """
        groups = [RequestGroup(list(group)) for group in asked if group]
        self._queue.extend(groups)
        total = sum(len(group.questions) for group in groups)
        for server in self._servers:
            server.ready, server.running = False, 0
        try:
            # All are asked before any is given work, but who does not answer is not waited for.
            await asyncio.wait([self._start(self._look(server)) for server in self._servers], timeout=LATE_S)
            for server in self._servers:
                self._start(self._watch(server))
            has = f"{self._who} has {{}} of {total} {self._what}s ({{}})"
            async with deadline(lambda: has.format(self._done, self._loads()), None):
                while self._done < total:
                    if not any(server.ready for server in self._servers):
                        await self._until_ready()
                    self._stirred.clear()
                    self._hand_out()
                    await self._stir(TICK)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        done = iter(groups)
        return [[answer for _, answer in sorted(next(done).found.items())] if group else [] for group in asked]

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._stirred.set())
        return task

    async def _stir(self, seconds: float) -> None:
        """Waits until something has happened; raises what a task has raised."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stirred.wait()
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            if not task.cancelled():
                task.result()

    def _loads(self) -> str:
        return ", ".join(
            f"{server.peer.name}: {f'{server.running} running' if server.ready else server.problem}"
            for server in self._servers
        )

    async def _until_ready(self) -> None:
        what = f"{self._who} waits for a server that {self._wanted}"
        async with deadline(lambda: f"{what} ({self._loads()})", self._options.start_s):
            while not any(server.ready for server in self._servers):
                self._stirred.clear()
                await self._stir(self._options.poll_s)

    async def _watch(self, server: Server) -> None:
        """Looks at a server that is not ready, again and again."""
        while True:
            await asyncio.sleep(self._options.poll_s)
            if not server.ready:
                await self._look(server)

    async def _look(self, server: Server) -> None:
        what = f"{self._who} waits for {server.peer.name} to say what it serves"
        try:
            async with deadline(what, min(LOOK_S, self._options.answer_s)):
                problem = await self._ask(server.peer)
        except OSError as error:
            problem = str(error)
        server.ready, server.problem = problem is None, problem or ""

    def _hand_out(self) -> None:
        now = asyncio.get_running_loop().time()
        ready = [server for server in self._servers if server.ready]
        free = [server for server in ready if server.resting <= now]
        for group in list(self._queue):
            least = min((group.failed[server] for server in ready), default=0)
            need = len(group.missing())
            choices = [s for s in free if s.running == 0 or s.running + need <= s.window]
            choices = [server for server in choices if group.failed[server] == least]
            if choices:
                self._queue.remove(group)
                self._give(group, min(choices, key=lambda server: server.running))
        if not self._queue and self._seconds:
            late = now - max(LATE_S, LATE * sum(self._seconds) / len(self._seconds))
            for server in free:
                if server.running == 0:
                    self._take_over(server, late)

    def _take_over(self, server: Server, late: float) -> None:
        """Gives an idle server the oldest group of the others that was begun before `late`."""
        since = {group: run.since for group in self._begun for run in group.runs.values() if len(group.runs) == 1}
        if since and min(since.values()) < late:
            self._counts["hedged"] += 1
            self._give(min(since, key=lambda group: since[group]), server)

    def _give(self, group: RequestGroup, server: Server) -> None:
        numbers = group.missing()
        server.running += len(numbers)
        run = Assignment(
            asyncio.get_running_loop().time(), len(numbers), self._start(self._work(server, group, numbers))
        )
        group.runs[server] = run
        self._begun.add(group)
        run.task.add_done_callback(lambda _: self._leave(server, group, run))

    def _leave(self, server: Server, group: RequestGroup, run: Assignment) -> None:
        server.running -= run.owes
        del group.runs[server]
        if not group.runs:
            self._begun.discard(group)
            if group.missing():
                self._queue.appendleft(group)

    async def _work(self, server: Server, group: RequestGroup, numbers: list[int]) -> None:
        """Has a server answer these of a group."""
        work = (self._answer(server, group, number) for number in numbers)
        problems = [found for found in await asyncio.gather(*work, return_exceptions=True) if found is not None]
        for problem in problems:
            if not isinstance(problem, OSError):
                raise problem
        if problems:
            self._blame(server, group, problems[0])

    async def _answer(self, server: Server, group: RequestGroup, number: int) -> None:
        question, run = group.questions[number], group.runs[server]
        call = question.call(server.peer)
        try:
            async with asyncio.timeout(self._options.answer_s):
                answer = await server.peer.post(call.path, call.body)
        except TimeoutError as error:
            what = f"{self._who} waits for {server.peer.name} to answer a {self._what}, {self._options.answer_s:g} s"
            raise TimeoutError(what) from error
        finally:
            server.running -= 1
            run.owes -= 1
            self._stirred.set()
        with server.peer.parse(f"the answer to a {self._what}"):
            found = question.read(server.peer, answer)
        server.answered(self._options.concurrency)
        self._take(group, number, found, run)

    def _take(self, group: RequestGroup, number: int, found: Any, run: Assignment) -> None:
        """Takes an answer that nobody has brought yet; with the last one of its group all work on it ends."""
        if number in group.found:
            return
        group.found[number] = found
        self._done += 1
        if self._progress is not None:
            self._progress(self._done)
        if not group.missing():
            self._seconds.append(asyncio.get_running_loop().time() - run.since)
            for other in group.runs.values():
                other.task.cancel()

    def _blame(self, server: Server, group: RequestGroup, problem: BaseException) -> None:
        """Takes note of a failure. The group waits for its turn again, unless that was one failure too many."""
        now = asyncio.get_running_loop().time()
        busy = isinstance(problem, RequestFailed) and problem.busy
        if busy or isinstance(problem, TimeoutError):
            server.rest(now)
        else:
            server.ready, server.problem = False, str(problem)
        if busy:
            server.busy = now if server.busy is None else server.busy
            if now - server.busy < self._options.answer_s:
                return
        logging.getLogger(__name__).warning("%s; its %ss are asked for again", problem, self._what)
        self._counts["retries"] += 1
        group.failed[server] += 1
        failures = group.failed.total()
        if failures > self._options.retries and len(group.runs) == 1:
            raise RequestFailed(
                f"{self._who} gives up on {len(group.questions)} {self._what}s after {failures} failures "
                f"({self._key}.retries={self._options.retries}); the last: {problem}"
            )
