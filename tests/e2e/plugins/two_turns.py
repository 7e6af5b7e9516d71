"""A source whose trajectories have two sampled segments around a given one: answer, hint, second answer."""

from dataclasses import dataclass

from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.batch.trajectory import Finish, Segment, Trajectory, to_row
from rft.data.base import CheckContext, Source, SourceFacts, SourceOptions
from rft.data.encode.encoder import Encoder
from rft.metrics import Metrics
from rft.rollout.answers import sampled_segment
from rft.rollout.engine.base import Request, row_seed
from rft.rollout.source.base import RolloutContext

BATCHES: list[TensorDict] = []  # for the test


@dataclass(frozen=True)
class TwoTurnOptions(SourceOptions):
    """Options of `TwoTurnSource`.

    Attributes:
        hint: the text between the answers.
    """

    hint: str

    def facts(self) -> SourceFacts:
        sampled = ("rollout_logprobs", "version", "turn", "scores", "terms")
        return SourceFacts((*SOURCE_COLUMNS, *sampled), fields=("prompt",), sampled="always", scores=True)

    def check_tokens(self, context: CheckContext, encoder: Encoder) -> None:
        hint = len(encoder.encode([self.hint])[0])
        if hint + 2 > context.max_new_tokens:
            raise ValueError(f"{context.key}.hint has {hint} tokens: raise {context.cap_key} to {hint + 2} or more")


class TwoTurnSource(Source):
    """The policy answers a prompt, reads a hint and answers again. The reward reads both answers and the hint.

    Each answer has at most half of `rollout.max_new_tokens`, without the hint.
    """

    Options = TwoTurnOptions

    def __init__(self, options: TwoTurnOptions, context: RolloutContext) -> None:
        super().__init__(options, context)
        self.temperature = context.sampling.temperature
        self.hint_tokens = context.encoder.encode([options.hint])[0]

    def next(self, metrics: Metrics) -> TensorDict:
        context = self.context
        drawn = self.row_sampler.take(context.prompts)[context.share]
        positions, rows = [position for position, _ in drawn], [context.rows[row] for _, row in drawn]
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
            trajectories.append(
                Trajectory(segments, Finish(end.finish_reason, start.text + self.options.hint + end.text), row)
            )
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
