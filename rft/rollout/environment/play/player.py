"""The policy in an episode: one dialogue, and the samples of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rft.batch.trajectory import Finish, Trajectory
from rft.data.encode.encoder import Encoder
from rft.data.tool_calls import ToolCall, assistant_message
from rft.rollout.answers import Answer, uncut
from rft.rollout.engine.base import row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.environment.call_format import CallNotices, CallReader, Read
from rft.rollout.environment.contract import Schema
from rft.rollout.environment.dialogue import Dialogue
from rft.rollout.environment.live import EnvironmentFailed, LiveEnvironment, Messages
from rft.rollout.environment.options import Environments
from rft.rollout.environment.record import EpisodeRecord
from rft.rollout.environment.turn_template import TurnTemplate
from rft.rollout.environment.turns import TurnQueue
from rft.rollout.forced_stop import ForcedStop


@dataclass(frozen=True)
class Policy:
    """What answers in all episodes of a round.

    Attributes:
        environments: of the run, and its limits.
        format: reads the calls of answers; None: answers have none.
        notices: of calls.
        encoder, template: encode messages.
        context: most tokens of a text that the model reads.
        turns: samples.
        sampling: how.
        forced_stop: of answers that are too long, or None.
    """

    environments: Environments
    format: CallReader | None
    notices: CallNotices
    encoder: Encoder
    template: TurnTemplate
    context: int
    turns: TurnQueue
    sampling: Sampling
    forced_stop: ForcedStop | None

    def described(self, tools: Mapping[str, Schema]) -> list[Schema] | None:
        """The tools that the prompt describes; None where it describes none."""
        return list(tools.values()) or None if self.format is None or self.format.described else None

    def room(self, dialogue: Dialogue) -> int:
        """Tokens that the next answer of a dialogue may have; below 1 where there is no room for one."""
        return min(self.context, dialogue.opening + self.environments.options.max_tokens) - len(dialogue.prompt)

    async def answer(
        self, prompt: list[int], seed: int, number: int, most: int, tools: Mapping[str, Schema]
    ) -> tuple[Answer, Read]:
        """Samples an answer, with what a forced stop inserts, and reads its text, content and calls.

        Args:
            prompt: token ids.
            seed: of the first answer; those of later ones follow from it.
            number: of the answer, from 0.
            most: tokens that it may have, beside `sampling.max_new_tokens`.
            tools: that it may call.
        """
        seed = seed if number == 0 else row_seed(seed, number, 1)
        answer = await self._sample(prompt, seed, min(most, self.sampling.max_new_tokens))
        if self.format is None:
            return answer, Read(answer.finish.text, answer.finish.text, [])
        read = self.format.read(prompt, answer, tools, self.sampling.stop)
        if tools:
            self.notices.answered(read)
        return answer, read

    async def _sample(self, prompt: list[int], seed: int, most: int) -> Answer:
        if self.forced_stop is None:
            return uncut(await self.turns.sample(prompt, seed, most, self.sampling))
        stop = self.forced_stop.with_encoder(self.encoder)
        start = await self.turns.sample(prompt, seed, stop.limit(seed, most), self.sampling)
        rest = stop.rest(prompt, start, seed, most)
        if rest is None:
            return uncut(start)
        how = stop.sampling_of_rest(self.sampling)
        end = await self.turns.sample(rest.prompt, rest.seeds[0], rest.limit(0, how), how)
        answer: Answer = stop.joined(start, end)
        return answer


class Player:
    """The policy in one dialogue with an environment.

    Args:
        policy: answers.
        row: of the data set.
        seed: of the first answer; those of later ones follow from it.

    Attributes:
        text: the last answer.
        reason: how it ended; `length` also if a limit ended the episode.
        answers: their number.
    """

    def __init__(self, policy: Policy, row: dict[str, Any], seed: int) -> None:
        self.text = ""
        self.reason: Literal["stop", "length"] = "stop"
        self.answers = 0
        self._policy = policy
        self._row = row
        self._seed = seed
        self._tools = policy.environments.classes[policy.environments.name_of(row)].tools
        self._messages: Messages = []
        self._opening = 0  # messages of the prompt
        self._dialogue: Dialogue | None = None

    @property
    def begun(self) -> bool:
        """Whether the dialogue is open."""
        return self._dialogue is not None

    def begin(self, observation: str | Messages | None) -> None:
        """Opens the dialogue with the prompt of the row and what the environment adds to it.

        Raises:
            EnvironmentFailed: the prompt cannot be encoded with it.
        """
        prompt = self._row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if isinstance(observation, str):  # as in TRL: behind the last message
            last = messages[-1]
            messages[-1] = {**last, "content": f"{last['content']}{observation}"}
        elif observation is not None:
            messages += observation
        self._messages, self._opening = messages, len(messages)
        try:
            self._dialogue = Dialogue(self._policy.template, messages, self._policy.described(self._tools))
        except ValueError as error:  # such as a prompt that is too long with what the environment adds
            raise EnvironmentFailed(f"prompt: {error}") from error

    def read(self, messages: Messages) -> None:
        """Appends messages of the environment to the dialogue."""
        assert self._dialogue is not None
        self._dialogue.extend(messages)
        self._messages += messages

    async def answer(self) -> list[ToolCall | str] | None:
        """Samples the next answer. Returns its tool calls; None if no token is left for an answer."""
        policy, dialogue = self._policy, self._dialogue
        assert dialogue is not None
        room = policy.room(dialogue)
        if room < 1:
            self.reason = "length"
            return None
        number, self.answers = self.answers, self.answers + 1
        answer, read = await policy.answer(dialogue.prompt, self._seed, number, room, self._tools)
        message = assistant_message(read.content, read.calls)
        dialogue.answer(answer, message)
        self._messages.append(message)
        self.text, self.reason = read.text, answer.finish.reason
        return read.calls

    def as_messages(self, observation: str | Messages) -> Messages:
        """What the environment shows, as messages; a text is one of the role user, and cut."""
        return [{"role": "user", "content": self.cut(observation)}] if isinstance(observation, str) else observation

    def cut(self, output: str) -> str:
        """An output of the environment of at most `tool_max_tokens` tokens."""
        most, encoder = self._policy.environments.options.tool_max_tokens, self._policy.encoder
        [ids] = encoder.encode([output])
        return output if len(ids) <= most else encoder.decode(ids[:most])

    def trajectory(
        self, live: LiveEnvironment, *, reward: float | None, failed: str | None, number: int = 0
    ) -> Trajectory:
        """The dialogue as a trajectory; also one that failed has one.

        Args:
            live: the environment, for its counts.
            reward: of this player; None if there is none.
            failed: why the episode has no score; None if it did not fail.
            number: of the player in a game.
        """
        dialogue = self._dialogue
        record = EpisodeRecord(
            self._messages,
            opening=self._opening,
            turns=self.answers,
            tool_calls=live.calls,
            tool_failures=live.failures,
            environment_s=live.seconds,
            forks=[] if dialogue is None else dialogue.forks,
            reward=reward,
            rewards=live.rewards,
            agent=self._policy.environments.number_of(self._row, number),
            failed=failed,
        )
        rows = [] if dialogue is None else dialogue.rows
        return record.trajectory(rows, Finish(self.reason, self.text), self._row, self._policy.encoder)
