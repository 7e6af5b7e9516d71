"""Answers rows by episodes: the policy and an environment take turns until the answer calls no tool, or a limit.

Each sample of a row is one episode; in a game of several players each sample is one of them.

A tool that fails is an error that the model reads. An environment that fails ends its own episode, which then has no
score. An answer that reaches a limit of tokens, or the last turn if it still calls tools, is truncated.
"""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

from rft.batch.trajectory import Trajectory
from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Rows
from rft.imports import import_part
from rft.remote.event_loop import EventLoop
from rft.rollout.answerer import Answerer
from rft.rollout.answers import Announce
from rft.rollout.engine.sampling import Sampling
from rft.rollout.environment.call_format import CallNotices
from rft.rollout.environment.instance import LocalInstance, Processes
from rft.rollout.environment.live import CallLimits, LiveEnvironment
from rft.rollout.environment.options import KEY, Environments
from rft.rollout.environment.play.episode import play_alone, play_game
from rft.rollout.environment.play.player import Policy
from rft.rollout.environment.turns import TurnQueue
from rft.rollout.forced_stop import ForcedStop
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
        self._template = environments.template(encoder)
        self._format = environments.call_format(encoder)
        self._notices = CallNotices()
        self._context = context
        nodes = environments.options.classes
        self._processes = Processes(nodes) if environments.options.workers == "process" else None

    def _answer(
        self,
        rows: Rows,
        seeds: Sequence[list[int]],
        sampling: Sampling,
        announce: Announce,
        forced_stop: ForcedStop | None,
    ) -> list[list[Trajectory]]:
        """See `Answerer.answer`."""
        if self._processes is not None:
            self._processes.start()
        loop = EventLoop("episodes")
        try:
            turns = TurnQueue(loop, self._sampler)
            policy = Policy(
                self._environments,
                self._format,
                self._notices,
                self._encoder,
                self._template,
                turns,
                sampling,
                self._context,
                forced_stop,
            )
            return turns.serve(self._run(rows, seeds, policy, announce))
        finally:
            loop.close()

    def close(self) -> None:
        """Ends the processes of environments."""
        if self._processes is not None:
            self._processes.close()

    async def _run(
        self, rows: Rows, seeds: Sequence[list[int]], policy: Policy, announce: Announce
    ) -> list[list[Trajectory]]:
        environments, options = self._environments, self._environments.options
        characters = options.tool_max_tokens * CHARACTERS
        limits = CallLimits(options.tool_deadline_s, characters, asyncio.Semaphore(options.concurrency))
        gateway = self._gateway(policy)

        async def one(number: int, row: dict[str, Any], samples: range) -> list[Trajectory]:
            """The trajectories of the samples of one episode."""
            own = [seeds[number][sample] for sample in samples]
            made = environments.classes[environments.name_of(row)]
            async with limits.slots if made.plays else nullcontext():  # the whole episode of an agent is one call
                live = self._live(row, limits)
                with policy.turns.dialogue():
                    if made.plays:
                        assert gateway is not None
                        found = [await gateway.play(live, row, own[0])]
                    elif made.players > 1:
                        found = await play_game(policy, live, row, own, made.players)
                    else:
                        found = [await play_alone(policy, live, row, own[0])]
            for sample, trajectory in zip(samples, found, strict=True):
                announce(number, sample, trajectory)
            return found

        try:
            async with gateway or nullcontext(), asyncio.TaskGroup() as group:
                tasks = [
                    [group.create_task(one(number, row, samples)) for samples in self._episodes(row, len(own))]
                    for number, (row, own) in enumerate(zip(rows, seeds, strict=True))
                ]
        except BaseExceptionGroup as errors:  # the first one has cancelled the other episodes
            raise errors.exceptions[0] from errors
        return [[trajectory for task in own for trajectory in task.result()] for own in tasks]

    def _episodes(self, row: dict[str, Any], samples: int) -> list[range]:
        """The samples of a row by episodes: one each, or the players of a game, of which the last one may have less."""
        players = self._environments.classes[self._environments.name_of(row)].players
        return [range(first, min(first + players, samples)) for first in range(0, samples, players)]

    def _gateway(self, policy: Policy) -> Any:
        """The `Gateway` that agents talk to, a part that needs the extra `serve`; None if no class plays by itself."""
        if not self._environments.plays:
            return None
        return import_part("rft.rollout.environment.gateway.server", "Gateway", f"{KEY}.classes")(policy)

    def _live(self, row: dict[str, Any], limits: CallLimits) -> LiveEnvironment:
        name = self._environments.name_of(row)
        made = self._environments.classes[name]
        instance = LocalInstance(made.target) if self._processes is None else self._processes.fork(name)
        return LiveEnvironment(made, instance, limits, self._notices)
