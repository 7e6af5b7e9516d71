"""The requests of one episode: they become dialogues of token ids, and in the end a trajectory."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from rft.batch.trajectory import Finish, Trajectory
from rft.data.tool_calls import Schema, ToolCall, assistant_message
from rft.rollout.environment.call_format import Read
from rft.rollout.environment.dialogue import Dialogue
from rft.rollout.environment.gateway.api import ApiError, ChatAnswer, ChatRequest
from rft.rollout.environment.live import LiveEnvironment
from rft.rollout.environment.options import AUTO, FORMAT
from rft.rollout.environment.play.player import Policy
from rft.rollout.environment.record import EpisodeRecord
from rft.rollout.environment.turn_template import Message

MOST = 32  # requests of one key at the same time; more get 429, which clients of OpenAI repeat
HISTORY = "history"  # the reason of a fork: a request has answers, but not as the session gave them


@dataclass
class Branch:
    """A dialogue of a session.

    Attributes:
        dialogue: its tokens.
        messages: of its requests, and the answers to them.
        tools: of its requests.
        opening: messages of the first prompt.
        answered: no request of it is in progress.
    """

    dialogue: Dialogue
    messages: list[Message]
    tools: dict[str, Schema]
    opening: int
    answered: bool = False

    def continues(self, request: ChatRequest) -> bool:
        """Whether a request begins with all messages of the dialogue, and adds some to its last answer."""
        size = len(self.messages)
        added = request.messages[size:]
        return (
            self.answered
            and bool(added)
            and request.messages[:size] == self.messages
            and request.tools == self.tools
            and all(message["role"] != "assistant" for message in added)
        )


class Session:
    """One episode of an agent, which talks to the policy by requests. `Gateway.session` opens it.

    A request that begins with all messages of a dialogue so far continues it, without encoding an answer again. Every
    other request begins a dialogue of its own, another row of the trajectory. So an agent may have several dialogues,
    also at the same time.

    Args:
        policy: answers.
        base_url: of the gateway, as clients of OpenAI take it.
        api_key: names the session.
        seed: of the first answer; those of later ones follow from it and their number.

    Attributes:
        base_url, api_key: as above.
    """

    def __init__(self, policy: Policy, base_url: str, api_key: str, seed: int) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self._sampling_s = 0.0  # in which requests waited for their answers; those at the same time count each
        self._policy = policy
        self._seed = seed
        self._asked = 0  # requests that are sampled
        self._branches: list[Branch] = []
        self._forks: list[str] = []
        self._calls, self._unreadable = 0, 0
        self._finish = Finish("stop", "")
        self._running: set[asyncio.Task[ChatAnswer]] = set()
        self._free = asyncio.Semaphore(MOST)  # less those requests that arrive or are answered

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Inside, a request is open. It enters before its body is read.

        Raises:
            ApiError: the session has as many as it may have.
        """
        if self._free.locked():
            raise ApiError(429, f"one key may have {MOST} requests at the same time", "rate_limit_exceeded")
        async with self._free:
            yield

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Samples the answer to a request.

        Raises:
            ApiError: the request is too long, cannot be encoded, or is the one after the last turn.
            asyncio.CancelledError: the session has ended meanwhile.
        """
        task = asyncio.create_task(self._answer(request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await task

    def end(self) -> None:
        """Ends the requests in progress."""
        for task in self._running:
            task.cancel()

    async def _answer(self, request: ChatRequest) -> ChatAnswer:
        policy = self._policy
        self._check_turns()
        branch = await self._branch(request)
        self._check_turns()  # others may have been answered meanwhile
        limit = min(self._left(branch), request.limit or policy.context)
        number, self._asked = self._asked, self._asked + 1
        prompt, start = branch.dialogue.prompt, time.perf_counter()
        answer, read = await policy.answer(prompt, self._seed, number, limit, request.tools)
        self._sampling_s += time.perf_counter() - start
        message = self._message(read, number)
        branch.dialogue.answer(answer, message)
        branch.messages.append(message)
        branch.answered = True
        self._finish = replace(answer.finish, text=read.text)
        return ChatAnswer(f"chatcmpl-{self._seed}-{number}", prompt, answer, message)

    def _check_turns(self) -> None:
        most = self._policy.environments.options.max_turns
        if self._asked == most:
            self._finish = Finish("length", self._finish.text)
            raise ApiError(400, f"environment.max_turns={most} answers are given", "max_turns")

    async def _branch(self, request: ChatRequest) -> Branch:
        """The dialogue of a request, which ends with its messages. A thread encodes them: long ones take seconds."""
        continued = [branch for branch in self._branches if branch.continues(request)]
        try:
            if continued:
                branch = max(continued, key=lambda branch: len(branch.messages))
                added = request.messages[len(branch.messages) :]
                branch.answered = False
                branch.dialogue = await asyncio.to_thread(branch.dialogue.extended, added)
                branch.messages += added
                return branch
            policy = self._policy
            if request.tools and policy.format is None:
                raise ValueError(f"{FORMAT}={AUTO}: no format reads the calls that the chat template writes; set it")
            described = policy.described(request.tools)
            prompt = await asyncio.to_thread(policy.template.rendered, request.messages, described)
            dialogue = Dialogue(policy.template, request.messages, described, prompt)
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_value", "messages") from error
        if self._branches and any(message["role"] == "assistant" for message in request.messages):
            self._forks.append(HISTORY)
        self._branches.append(Branch(dialogue, list(request.messages), request.tools, len(request.messages)))
        return self._branches[-1]

    def _left(self, branch: Branch) -> int:
        """Tokens that the next answer of a dialogue may have.

        Raises:
            ApiError: none; in the words of OpenAI, by which agents recognise it.
        """
        size, room = len(branch.dialogue.prompt), self._policy.room(branch.dialogue)
        if room > 0:
            return room
        self._finish = Finish("length", self._finish.text)
        raise ApiError(
            400,
            f"This model's maximum context length is {size + room} tokens. However, your messages resulted in {size} "
            "tokens (environment.max_tokens, or the context of the model)",
            "context_length_exceeded",
            "messages",
        )

    def _message(self, read: Read, number: int) -> Message:
        """The message of an answer; a text whose calls cannot be read is its content."""
        readable = [call for call in read.calls if isinstance(call, ToolCall)]
        self._calls += len(read.calls)
        self._unreadable += len(read.calls) - len(readable)
        message = assistant_message(read.content if readable or not read.calls else read.text, read.calls)
        for place, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call{number:03}{place:02}"  # nine characters, as some templates want them
        return message

    def trajectory(
        self, live: LiveEnvironment, row: dict[str, Any], *, reward: float | None, failed: str | None
    ) -> Trajectory:
        """The episode as a trajectory: a row for each dialogue, and for each fork of one.

        Args:
            live: the agent, for its seconds; those of the policy's answers are not its own.
            row: of the data set.
            reward: of the episode; None if it has none.
            failed: why the episode has no score; None if it did not fail.
        """
        rows = [segments for branch in self._branches for segments in branch.dialogue.rows]
        if not rows:
            failed = failed or "requests: the agent has no answer of the policy"
        record = EpisodeRecord(
            [message for branch in self._branches for message in branch.messages],
            opening=self._branches[0].opening if self._branches else 0,
            turns=sum(segment.starts_turn for segments in rows for segment in segments),
            tool_calls=self._calls,
            tool_failures=self._unreadable,
            environment_s=max(0.0, live.seconds - self._sampling_s),
            forks=[*self._forks, *(reason for branch in self._branches for reason in branch.dialogue.forks)],
            reward=reward,
            rewards=[],
            agent=self._policy.environments.number_of(row),
            failed=failed,
        )
        return record.trajectory(rows, self._finish, row, self._policy.encoder)
