"""A source whose trajectories have two sampled segments around a given one: answer, hint, second answer."""

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.batch.trajectory import Finish, Segment, Trajectory, to_row
from rft.data.base import CheckContext, Source, SourceFacts
from rft.data.encode.encoder import Encoder
from rft.metrics import Metrics
from rft.rollout.answers import sampled_segment
from rft.rollout.engine.base import Request, row_seed
from rft.rollout.source.base import RolloutContext

BATCHES: list[TensorDict] = []  # for the test


class TwoTurnSource(Source):
    """The policy answers a prompt, reads a hint and answers again. The reward reads both answers and the hint.

    Args:
        context: of the stage; each answer has at most half of `rollout.max_new_tokens`, without the hint.
        hint: the text between the answers.
    """

    def __init__(self, context: RolloutContext, *, hint: str) -> None:
        self.temperature = context.sampling.temperature
        self.context = context
        self.hint = hint
        self.hint_tokens = context.encoder.encode([hint])[0]
        self.position = 0

    @classmethod
    def facts(cls, options: Mapping[str, Any]) -> SourceFacts:
        sampled = ("rollout_logprobs", "version", "turn", "scores", "terms")
        return SourceFacts((*SOURCE_COLUMNS, *sampled), fields=("prompt",), sampled="always", scores=True)

    @classmethod
    def check_tokens(cls, options: Mapping[str, Any], context: CheckContext, encoder: Encoder) -> None:
        hint = len(encoder.encode([options["hint"]])[0])
        if hint + 2 > context.max_new_tokens:
            raise ValueError(f"{context.key}.hint has {hint} tokens: raise {context.cap_key} to {hint + 2} or more")

    def samples(self) -> bool:
        return True

    def next(self, metrics: Metrics) -> TensorDict:
        context, world = self.context, self.context.world
        positions = list(range(self.position + world.rank, self.position + context.prompts, world.size))
        self.position += context.prompts
        rows = [context.rows[position % len(context.rows)] for position in positions]
        prompts = context.encoder.prompts(rows)
        limit = (context.sampling.max_new_tokens - len(self.hint_tokens)) // 2
        limits = [limit] * context.group_size
        first = [Request(r.prompt, r.seeds, limits) for r in context.requests(prompts, positions)]
        with metrics.timer("rollout"):
            begun = context.sampler.generate(first, context.sampling)
            second = [
                Request(request.prompt + answer.tokens + self.hint_tokens, [row_seed(seed, 0, 1)], [limit])
                for request, group in zip(first, begun, strict=True)
                for seed, answer in zip(request.seeds, group, strict=True)
            ]
            ended = [answer for [answer] in context.sampler.generate(second, context.sampling)]
        trajectories = []
        for number, (start, end) in enumerate(zip((a for group in begun for a in group), ended, strict=True)):
            prompt, row = prompts[number // context.group_size], rows[number // context.group_size]
            hint = Segment(self.hint_tokens, trains=False)
            segments = [Segment(prompt, trains=False), sampled_segment(start), hint, sampled_segment(end)]
            trajectories.append(Trajectory(segments, Finish(end.finish_reason, start.text + self.hint + end.text), row))
        texts = [trajectory.finish.text for trajectory in trajectories if trajectory.finish is not None]
        scores = context.score(texts, [trajectory.row for trajectory in trajectories])
        made = []
        for number, trajectory in enumerate(trajectories):
            group, sample = positions[number // context.group_size], number % context.group_size
            row = to_row(trajectory, group=group, unit=group * context.group_size + sample, turns=True)
            scores.add_to(row, number)
            made.append(row)
        BATCHES.append(batch := collate(made))
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
