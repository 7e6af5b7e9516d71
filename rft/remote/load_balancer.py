"""Distributes groups of requests over servers: least loaded first, every result taken once, failed requests repeated.

A group, such as the samples of one prompt, goes to one server, which then computes the prompt once. A server that is
busy or exceeds its deadline gets half as many requests at once; every answer raises that number again. When all groups
are handed out, an idle server also gets the oldest unfinished group of another server, and the first result is taken.

Groups come in rounds. Several rounds may run at a time, from several threads; their groups share one queue.
"""

import asyncio
import contextlib
import logging
from bisect import insort_left, insort_right
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft.remote.http_client import PROBE_S, RequestFailed, ServerClient, deadline
from rft.remote.retry import ServerPolicy
from rft.remote.server_requests import Assignment, Continued, RequestGroup, Round, Server, ServerRequest
from rft.waits import Reminder

TICK_S = 0.1  # between looks for groups that are late
# A group is late after LATE times the mean duration of finished groups, but not before LATE_S seconds.
LATE = 2.0
LATE_S = 1.0
RECENT = 1000  # finished groups whose mean duration counts


@dataclass(eq=False)
class LoadBalancer:
    """Distributes groups over the servers. All calls belong to one event loop.

    Attributes:
        who, what, wanted: for messages and logs: the process that requests, what it requests, and what a server must do
            to be ready, such as `rank 0`, `sample` and `serves version 3`.
        servers: their windows and backoffs are kept from round to round.
        probe: asks a server whether it can take requests; returns None, or the reason why it cannot.
        policy: most requests at once, tolerated failures of a group, deadlines.
        key: of the policy's options in the yaml.
        counts: receives `retries` and `hedged`, in groups.
    """

    who: str
    what: str
    wanted: str
    servers: list[Server]
    probe: Callable[[ServerClient], Awaitable[str | None]]
    policy: ServerPolicy
    key: str
    counts: Counter[str]
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _switch: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)  # held while the work begins or ends
    _distributor: asyncio.Task[None] | None = field(init=False, default=None)
    _rounds: set[Round] = field(init=False, default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _queue: list[RequestGroup] = field(init=False, default_factory=list)  # by the order of their rounds
    _started: set[RequestGroup] = field(init=False, default_factory=set)
    # The deadlines of requests; during a pause, the seconds that each has left.
    _limits: dict[asyncio.Timeout, float] = field(init=False, default_factory=dict)
    _paused_since: float | None = field(init=False, default=None)
    # that finished groups took
    _seconds: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=RECENT))

    async def run(
        self,
        groups: Sequence[Sequence[ServerRequest]],
        on_result: Callable[[int, int, Any], None] | None = None,
        order: int = 0,
    ) -> list[list[Any]]:
        """Distributes a round, and returns the results of every group, in the order of its requests.

        Args:
            on_result: called once for each result with the number of its group, that of its request in the group, and
                the result.
            order: see `Round`.

        Raises:
            RequestFailed: a group has failed too often; names the server.
            TimeoutError: no server is ready within `start_s`; names all servers.
        """
        total = sum(map(len, groups))
        one = Round(total, order, on_result, asyncio.get_running_loop().create_future())
        one.groups += [RequestGroup(one, number, list(group)) for number, group in enumerate(groups) if group]
        if not total:
            one.end()
        try:
            async with self._switch:
                self._rounds.add(one)
                for group in one.groups:
                    insort_right(self._queue, group, key=_order)
                if self._distributor is None or self._distributor.done():
                    self._distributor = self._start(self._distribute())
                    self._distributor.add_done_callback(self._end_rounds)
                self._changed.set()
            has = f"{self.who} has {{}} of {total} {self.what}s ({{}})"
            async with deadline(lambda: has.format(one.done, self._loads()), None, Reminder(self.key)):
                await one.ended
        finally:
            await asyncio.shield(self._leave(one))
        done = iter(one.groups)
        return [[result for _, result in sorted(next(done).results.items())] if group else [] for group in groups]

    async def _leave(self, one: Round) -> None:
        """Gives up the work on a round; with the last round all work ends."""
        async with self._switch:
            self._rounds.discard(one)
            self._queue = [group for group in self._queue if group.round is not one]
            started = [group for group in self._started if group.round is one]
            tasks = {assignment.task for group in started for assignment in group.assignments.values()}
            if not self._rounds:
                tasks, self._tasks, self._distributor = tasks | self._tasks, set(), None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def unfinished(self) -> list[tuple[int, ServerRequest]]:
        """The requests without a result of all rounds that run, each with the order of its round."""
        groups = (group for one in self._rounds for group in one.groups)
        return [(group.round.order, group.requests[number]) for group in groups for number in group.missing()]

    async def abort(self, error: OSError) -> None:
        """Ends every round with an error."""
        for one in list(self._rounds):
            one.end(error)

    async def pause(self) -> None:
        """The servers answer nothing until `resume`: these seconds count neither for deadlines nor as slowness."""
        now = asyncio.get_running_loop().time()
        self._paused_since = now
        for limit in self._limits:
            if (when := limit.when()) is not None and not limit.expired():
                self._limits[limit] = when - now
                limit.reschedule(None)

    async def resume(self) -> None:
        """The servers answer again: deadlines and durations continue where `pause` stopped them."""
        now = asyncio.get_running_loop().time()
        assert self._paused_since is not None
        seconds, self._paused_since = now - self._paused_since, None
        for limit, left in self._limits.items():
            if not limit.expired():
                limit.reschedule(now + left)
        for group in self._started:
            for assignment in group.assignments.values():
                assignment.since = min(now, assignment.since + seconds)

    async def _distribute(self) -> None:
        """Hands out the groups of all rounds, as long as there are rounds."""
        self._seconds.clear()
        for server in self.servers:
            server.ready, server.running = False, 0
        # All servers are probed before the first gets requests, but a slow one delays that by LATE_S at most.
        await asyncio.wait([self._start(self._probe(server)) for server in self.servers], timeout=LATE_S)
        for server in self.servers:
            self._start(self._watch(server))
        while True:
            if not any(server.ready for server in self.servers):
                await self._until_ready()
            self._changed.clear()
            self._hand_out()
            await self._wait_for_change(TICK_S)

    def _end_rounds(self, distributor: asyncio.Task[None]) -> None:
        """Ends all rounds with the error of what distributes them."""
        if not distributor.cancelled() and (error := distributor.exception()) is not None:
            for one in self._rounds:
                one.end(error)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._changed.set())
        return task

    async def _wait_for_change(self, seconds: float) -> None:
        """Waits until a task ends or a request is answered; raises what a task has raised."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            if not task.cancelled():
                task.result()

    def _loads(self) -> str:
        return ", ".join(
            f"{server.client.name}: {f'{server.running} running' if server.ready else server.problem}"
            for server in self.servers
        )

    async def _until_ready(self) -> None:
        what = f"{self.who} waits for a server that {self.wanted}"
        async with deadline(lambda: f"{what} ({self._loads()})", self.policy.start_s):
            while not any(server.ready for server in self.servers):
                self._changed.clear()
                await self._wait_for_change(self.policy.poll_s)

    async def _watch(self, server: Server) -> None:
        """Probes a server at intervals while it is not ready."""
        while True:
            await asyncio.sleep(self.policy.poll_s)
            if not server.ready:
                await self._probe(server)

    async def _probe(self, server: Server) -> None:
        what = f"{self.who} waits for {server.client.name} to report what it serves"
        try:
            async with deadline(what, min(PROBE_S, self.policy.answer_s)):
                problem = await self.probe(server.client)
        except OSError as error:
            problem = str(error)
        server.ready, server.problem = problem is None, problem or ""

    def _hand_out(self) -> None:
        now = asyncio.get_running_loop().time()
        ready = [server for server in self.servers if server.ready]
        free = [server for server in ready if not server.backoff.pausing]
        for group in list(self._queue):
            if not any(server.running == 0 or server.running < server.window for server in free):
                break
            fewest = min((group.failures[server] for server in ready), default=0)
            need = len(group.missing())
            choices = [s for s in free if s.running == 0 or s.running + need <= s.window]
            choices = [server for server in choices if group.failures[server] == fewest]
            if choices:
                self._queue.remove(group)
                self._assign(group, min(choices, key=lambda server: server.running))
        if not self._queue and self._seconds and self._paused_since is None:
            late = now - max(LATE_S, LATE * sum(self._seconds) / len(self._seconds))
            for server in free:
                if server.running == 0:
                    self._hedge(server, late)

    def _hedge(self, server: Server, late: float) -> None:
        """Assigns an idle server the oldest group of one other server, if that server got the group before `late`."""
        since = {
            group: assignment.since
            for group in self._started
            for assignment in group.assignments.values()
            if len(group.assignments) == 1 and server not in group.assignments  # where it may just have failed
        }
        if since and min(since.values()) < late:
            self.counts["hedged"] += 1
            self._assign(min(since, key=lambda group: since[group]), server)

    def _assign(self, group: RequestGroup, server: Server) -> None:
        numbers = group.missing()
        server.running += len(numbers)
        task = self._start(self._work(server, group, numbers))
        assignment = Assignment(asyncio.get_running_loop().time(), len(numbers), task)
        group.assignments[server] = assignment
        self._started.add(group)
        task.add_done_callback(lambda _: self._end(server, group, assignment))

    def _end(self, server: Server, group: RequestGroup, assignment: Assignment) -> None:
        server.running -= assignment.outstanding
        del group.assignments[server]
        if not group.assignments:
            self._started.discard(group)
            if group.missing() and group.round in self._rounds:
                insort_left(self._queue, group, key=_order)

    async def _work(self, server: Server, group: RequestGroup, numbers: list[int]) -> None:
        """Sends these requests of a group to a server. An error that is not one of the server ends the round."""
        work = (self._request(server, group, number) for number in numbers)
        problems = [found for found in await asyncio.gather(*work, return_exceptions=True) if found is not None]
        for problem in problems:
            if not isinstance(problem, OSError):
                return group.round.end(problem)
        if problems:
            self._record_failure(server, group, problems[0])

    async def _request(self, server: Server, group: RequestGroup, number: int) -> None:
        assignment = group.assignments[server]
        try:
            result = await self._answer(server, group, number)
        finally:
            server.running -= 1
            assignment.outstanding -= 1
            self._changed.set()
        server.answered(self.policy.concurrency)
        self._take(group, number, result, assignment)

    async def _answer(self, server: Server, group: RequestGroup, number: int) -> Any:
        """The result of a request, of which a server may answer one part after the other."""
        client = server.client
        what = f"{self.who} waits for {client.name} to answer a {self.what}"
        while True:
            request = group.requests[number]
            call = request.call(client)
            async with deadline(what, self.policy.answer_s) as limit:
                self._limits[limit] = self.policy.answer_s
                if self._paused_since is not None:
                    limit.reschedule(None)
                try:
                    answer = await client.post(call.path, call.body)
                finally:
                    del self._limits[limit]
            with client.parse(f"the answer to a {self.what}"):
                result = request.read(client, answer)
            if not isinstance(result, Continued):
                return result
            group.requests[number] = result.request

    def _take(self, group: RequestGroup, number: int, result: Any, assignment: Assignment) -> None:
        """Keeps the first result of a request; with the last result of a group all other work on it is cancelled."""
        if number in group.results:
            return
        group.results[number], one = result, group.round
        if one.on_result is not None:
            one.on_result(group.number, number, result)
        one.done += 1
        if not group.missing():
            self._seconds.append(asyncio.get_running_loop().time() - assignment.since)
            for other in group.assignments.values():
                other.task.cancel()
        if one.done == one.total:
            one.end()

    def _record_failure(self, server: Server, group: RequestGroup, problem: BaseException) -> None:
        """Counts a failure of a group, which `_end` puts back into the queue; more than `retries` end the round."""
        now = asyncio.get_running_loop().time()
        busy = isinstance(problem, RequestFailed) and problem.busy
        if busy or isinstance(problem, TimeoutError):
            server.rest()
        else:
            server.ready, server.problem = False, str(problem)
        if busy:
            server.busy_since = now if server.busy_since is None else server.busy_since
            if now - server.busy_since < self.policy.answer_s:
                return
        logging.getLogger(__name__).warning("%s; its %ss are requested again", problem, self.what)
        self.counts["retries"] += 1
        group.failures[server] += 1
        failures = group.failures.total()
        if failures > self.policy.retries and len(group.assignments) == 1:
            message = (
                f"{self.who} gives up on {len(group.requests)} {self.what}s after {failures} failures "
                f"({self.key}.retries={self.policy.retries}); the last: {problem}"
            )
            group.round.end(RequestFailed(message))


def _order(group: RequestGroup) -> int:
    return group.round.order
