"""Answers rows by episodes: the policy and an environment take turns until the answer calls no tool, or a limit.

Each sample of a row is one episode; in a game of several players each sample is one of them.

A tool that fails is an error that the model reads. An environment that fails ends its own episode, which then has no
score. An answer that reaches a limit of tokens, or the last turn if it still calls tools, is truncated.
"""

import asyncio
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

from rft.batch.trajectory import Trajectory
from rft.data.encode.encoder import Encoder
from rft.imports import import_part
from rft.remote.event_loop import EventLoop
from rft.rollout.answerer import Answerer, RowRequests
from rft.rollout.answers import Announce
from rft.rollout.environment.call_format import CallNotices
from rft.rollout.environment.instance import LocalInstance, Processes
from rft.rollout.environment.live import CallLimits, LiveEnvironment
from rft.rollout.environment.options import KEY, Environments
from rft.rollout.environment.play.episode import play_alone, play_game
from rft.rollout.environment.play.player import Policy
from rft.rollout.environment.turns import TurnQueue
from rft.rollout.sampler import Sampler

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
        super().__init__(encoder, sampler)
        self._environments = environments
        format, template = environments.call_format(encoder), environments.template(encoder)
        self._policy = partial(Policy, environments, format, CallNotices(), encoder, template, context)
        nodes = environments.options.classes
        self._processes = Processes(nodes) if environments.options.workers == "process" else None

    def answer(self, asked: RowRequests, announce: Announce) -> list[list[Trajectory]]:
        if self._processes is not None:
            self._processes.start()
        loop = EventLoop("episodes")
        try:
            turns = TurnQueue(loop, self._sampler)
            policy = self._policy(turns, asked.sampling, asked.forced_stop)
            return turns.serve(self._run(asked, policy, announce))
        finally:
            loop.close()

    def close(self) -> None:
        """Ends the processes of environments."""
        if self._processes is not None:
            self._processes.close()

    async def _run(self, asked: RowRequests, policy: Policy, announce: Announce) -> list[list[Trajectory]]:
        environments, options = self._environments, self._environments.options
        characters = options.tool_max_tokens * CHARACTERS
        limits = CallLimits(options.tool_deadline_s, characters, asyncio.Semaphore(options.concurrency))
        gateway = None
        if environments.plays:  # a part that needs the extra `serve`
            gateway = import_part("rft.rollout.environment.gateway.server", "Gateway", f"{KEY}.classes")(policy)

        async def one(number: int, row: dict[str, Any], samples: range) -> list[Trajectory]:
            """The trajectories of the samples of one episode."""
            own = [asked.seeds[number][sample] for sample in samples]
            name = environments.name_of(row)
            kind = environments.classes[name]
            async with limits.slots if kind.plays else nullcontext():  # the whole episode of an agent is one call
                instance = LocalInstance(kind.target) if self._processes is None else self._processes.fork(name)
                live = LiveEnvironment(kind, instance, limits, policy.notices)
                with policy.turns.dialogue():
                    if kind.plays:
                        assert gateway is not None
                        played = [await gateway.play(live, row, own[0])]
                    elif kind.players > 1:
                        played = await play_game(policy, live, row, own, kind.players)
                    else:
                        played = [await play_alone(policy, live, row, own[0])]
            trajectories = [self.with_opened_thought(trajectory) for trajectory in played]
            for sample, trajectory in zip(samples, trajectories, strict=True):
                announce(number, sample, trajectory)
            return trajectories

        try:
            async with gateway or nullcontext(), asyncio.TaskGroup() as group:
                tasks = [
                    [group.create_task(one(number, row, samples)) for samples in self._episodes(row, len(own))]
                    for number, (row, own) in enumerate(zip(asked.rows, asked.seeds, strict=True))
                ]
        except BaseExceptionGroup as errors:  # the first one has cancelled the other episodes
            raise errors.exceptions[0] from errors
        return [[trajectory for task in own for trajectory in task.result()] for own in tasks]

    def _episodes(self, row: dict[str, Any], samples: int) -> list[range]:
        """The samples of a row by episodes: one each, or the players of a game, of which the last one may have less."""
        players = self._environments.classes[self._environments.name_of(row)].players
        return [range(first, min(first + players, samples)) for first in range(0, samples, players)]
