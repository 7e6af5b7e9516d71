"""Answers rows by episodes: the policy and an environment take turns until the answer calls no tool, or a limit.

A tool that fails is an error that the model reads. An environment that fails ends its own episode, which then has no
score. An answer that reaches a limit of tokens, or the last turn if it still calls tools, is truncated.
"""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rft.batch.trajectory import Finish, Segment, Trajectory
from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Rows
from rft.remote.event_loop import EventLoop
from rft.rollout.answers import Announce, Answerer
from rft.rollout.engine.base import Completion, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.environment.dialogue import Dialogue
from rft.rollout.environment.gateway.session import Policy
from rft.rollout.environment.instance import LocalInstance, Processes
from rft.rollout.environment.live import CallLimits, EnvironmentFailed, LiveEnvironment, Messages
from rft.rollout.environment.options import Environments
from rft.rollout.environment.record import episode_record
from rft.rollout.environment.tool_calls import assistant_message
from rft.rollout.environment.turn_template import TurnTemplate
from rft.rollout.environment.turns import TurnQueue
from rft.rollout.sampler import Sampler

if TYPE_CHECKING:
    from rft.rollout.environment.gateway.server import Gateway

CHARACTERS = 32  # of an output for each token that it may have; the rest is cut before it is tokenized


class EpisodeAnswerer(Answerer):
    """Runs an episode for every sample.

    Args:
        environments: of the run.
        encoder: makes the prompt of a row.
        sampler: samples the turns.
        context: most tokens of a text that the model reads.
    """

    episodes: ClassVar[bool] = True

    def __init__(self, environments: Environments, encoder: Encoder, sampler: Sampler, context: int) -> None:
        self._environments = environments
        self._encoder = encoder
        self._template = TurnTemplate(encoder)
        self._sampler = sampler
        self._context = context
        nodes = environments.options.classes
        self._processes = Processes(nodes) if environments.options.workers == "process" else None

    def answer(
        self, rows: Rows, seeds: Sequence[list[int]], sampling: Sampling, announce: Announce
    ) -> list[list[Trajectory]]:
        """See `Answerer.answer`."""
        loop = EventLoop("episodes")
        try:
            turns = TurnQueue(loop, self._sampler)
            return turns.serve(self._run(rows, seeds, sampling, turns, announce))
        finally:
            loop.close()

    def close(self) -> None:
        """Ends the processes of environments."""
        if self._processes is not None:
            self._processes.close()

    async def _run(
        self, rows: Rows, seeds: Sequence[list[int]], sampling: Sampling, turns: TurnQueue, announce: Announce
    ) -> list[list[Trajectory]]:
        environments, options = self._environments, self._environments.options
        characters = options.tool_max_tokens * CHARACTERS
        limits = CallLimits(options.tool_deadline_s, characters, asyncio.Semaphore(options.concurrency))
        gateway = self._gateway(turns, sampling)

        async def one(number: int, sample: int) -> Trajectory:
            row, seed = rows[number], seeds[number][sample]
            plays = environments.classes[environments.name_of(row)].plays
            async with limits.slots if plays else nullcontext():  # the whole episode of an agent is one call
                live = self._live(row, limits)
                with turns.dialogue():
                    if plays:
                        assert gateway is not None
                        trajectory = await gateway.play(live, row, seed)
                    else:
                        episode = Episode(environments, live, row, turns, sampling, seed)
                        trajectory = await episode.play(self._encoder, self._template, self._context)
            announce(number, sample, trajectory)
            return trajectory

        try:
            async with gateway or nullcontext(), asyncio.TaskGroup() as group:
                tasks = [[group.create_task(one(i, j)) for j in range(len(own))] for i, own in enumerate(seeds)]
        except BaseExceptionGroup as errors:  # the first one has cancelled the other episodes
            raise errors.exceptions[0] from errors
        return [[task.result() for task in own] for own in tasks]

    def _gateway(self, turns: TurnQueue, sampling: Sampling) -> "Gateway | None":
        """What agents talk to; None if no class plays by itself."""
        if not self._environments.plays:
            return None
        from rft.rollout.environment.gateway.server import Gateway

        return Gateway(Policy(self._environments, self._encoder, self._template, turns, sampling, self._context))

    def _live(self, row: dict[str, Any], limits: CallLimits) -> LiveEnvironment:
        name = self._environments.name_of(row)
        made = self._environments.classes[name]
        instance = LocalInstance(made.target) if self._processes is None else self._processes.fork(name)
        return LiveEnvironment(made, instance, limits)


class Episode:
    """One dialogue between the policy and an environment.

    Args:
        environments: of the run.
        live: the environment.
        row: of the data set.
        turns: samples the answers.
        sampling: how.
        seed: of the first answer; those of later ones follow from it.
    """

    def __init__(
        self,
        environments: Environments,
        live: LiveEnvironment,
        row: dict[str, Any],
        turns: TurnQueue,
        sampling: Sampling,
        seed: int,
    ) -> None:
        self._row = row
        self._calls = environments.calls
        self._options = environments.options
        self._class = environments.classes[environments.name_of(row)]
        self._agent = environments.number_of(row)
        self._live = live
        self._turns = turns
        self._sampling = sampling
        self._seed = seed
        self._number = 0  # of answers
        self._messages: Messages = []
        self._opening = 0  # messages of the prompt
        self._dialogue: Dialogue | None = None
        self._text = ""
        self._reason: Literal["stop", "length"] = "stop"

    async def play(self, encoder: Encoder, template: TurnTemplate, context: int) -> Trajectory:
        """Plays the episode to its end; also one that fails has a trajectory."""
        talk = self._talk(encoder, template, context)
        reward, failed = await self._live.outcome(talk, self._options.max_seconds)
        return self._trajectory(encoder, reward, failed)

    async def _talk(self, encoder: Encoder, template: TurnTemplate, context: int) -> float | None:
        """The episode from `reset` on; returns its reward."""
        self._begin(template, await self._live.reset(self._row))
        await self._converse(encoder, context)
        return await self._live.reward()

    def _begin(self, template: TurnTemplate, observation: str | Messages | None) -> None:
        """Opens the dialogue with the prompt of the row and what the environment adds to it."""
        prompt = self._row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if isinstance(observation, str):  # as in TRL: behind the last message
            last = messages[-1]
            messages[-1] = {**last, "content": f"{last['content']}{observation}"}
        elif observation is not None:
            messages += observation
        self._messages, self._opening = messages, len(messages)
        described = list(self._class.tools.values()) if self._calls.facts.described else []
        try:
            self._dialogue = Dialogue(template, messages, described or None)
        except ValueError as error:  # such as a prompt that is too long with what the environment adds
            raise EnvironmentFailed(f"prompt: {error}") from error

    async def _converse(self, encoder: Encoder, context: int) -> None:
        """Turns of the policy and of the environment."""
        dialogue, options = self._dialogue, self._options
        assert dialogue is not None
        opening = len(dialogue.prompt)
        while True:
            left = min(options.max_tokens - (len(dialogue.prompt) - opening), context - len(dialogue.prompt))
            if left < 1:
                self._reason = "length"
                return
            answer = await self._sample(dialogue.prompt, min(left, self._sampling.max_new_tokens))
            content, calls = self._calls(answer.text, self._class.tools)
            message = assistant_message(content, calls)
            dialogue.answer(answer, message)
            self._messages.append(message)
            self._text, self._reason = answer.text, answer.finish_reason
            if answer.finish_reason == "length":
                return
            if self._live.steps:
                observation, terminated, truncated = await self._live.step(answer.text)
                if isinstance(observation, str):
                    observation = [{"role": "user", "content": self._cut(encoder, observation)}]
                given, ended = observation, terminated or truncated
                self._reason = "length" if truncated and not terminated else "stop"
            elif calls:
                outputs = await asyncio.gather(*(self._live.use(call) for call in calls))
                given, ended = [{"role": "tool", "content": self._cut(encoder, output)} for output in outputs], False
            else:
                return
            if ended or self._number == options.max_turns:
                self._reason = self._reason if ended else "length"
                return
            dialogue.extend(given)
            self._messages += given

    async def _sample(self, prompt: list[int], limit: int) -> Completion:
        seed = self._seed if self._number == 0 else row_seed(self._seed, self._number, 1)
        self._number += 1
        return await self._turns.sample(prompt, seed, limit, self._sampling)

    def _cut(self, encoder: Encoder, output: str) -> str:
        """An output of at most `tool_max_tokens` tokens."""
        most = self._options.tool_max_tokens
        [ids] = encoder.encode([output])
        return output if len(ids) <= most else encoder.decode(ids[:most])

    def _trajectory(self, encoder: Encoder, reward: float | None, failed: str | None) -> Trajectory:
        dialogue = self._dialogue
        rows = [] if dialogue is None else dialogue.rows
        if not rows:  # the environment failed before the first answer
            rows = [[Segment(encoder.prompt(self._row), trains=False)]]
        counts = self._live.counts
        record = episode_record(
            self._messages,
            opening=self._opening,
            turns=self._number,
            tool_calls=counts.calls,
            tool_failures=counts.failures,
            environment_s=counts.seconds,
            forks=[] if dialogue is None else dialogue.forks,
            reward=reward,
            rewards=self._live.rewards,
            agent=self._agent,
            failed=failed,
        )
        finish = Finish(self._reason, self._text)
        return Trajectory(rows[-1], finish, self._row, tuple(rows[:-1]), record)
