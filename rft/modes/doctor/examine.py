"""Compares what the engine says of its tokens with what the trainer says of them, and finds out why they differ.

Every cause that is named was tried: the trainer scores otherwise, or the engine is handed other weights, and the gap is
taken again. Left out: two causes at once, which the table shows and no sentence names.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.base import TrainableModel
from rft.algorithm.roles import POLICY
from rft.metrics import Metrics
from rft.modes.doctor.causes import TOLERANCE, Suspect
from rft.modes.doctor.report import DoctorReport, Gap
from rft.rollout.engine.base import Completion, Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler
from rft.train.stage import Stage
from rft.train.trainer import Trainer

SCALE = 1.1  # of the weights that are made wrong on purpose
ALONE = 8  # rows that are scored one by one
SHOWN = 60  # characters of a prompt


class OverridingSampler(Sampler):
    """Samples as another sampler does, but for how tokens are drawn.

    Args:
        own: the sampler of the run.

    Attributes:
        plain: samples without truncation.
        greedy: takes the most likely tokens, which are the same every time, also for an engine that ignores seeds.
    """

    def __init__(self, own: Sampler) -> None:
        self.plain = False
        self.greedy = False
        self._own = own

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """See `Sampler.generate`."""
        if self.plain or self.greedy:
            sampling = sampling.untruncated(0.0 if self.greedy else sampling.temperature)
        return self._own.generate(requests, sampling, progress)

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]], model: str = POLICY) -> None:
        """See `Sampler.publish`."""
        self._own.publish(version, weights, model)

    def release(self) -> None:
        """See `Sampler.release`."""
        self._own.release()

    def close(self) -> None:
        """See `Sampler.close`."""
        self._own.close()


@dataclass(frozen=True)
class Facts:
    """What the config says.

    Attributes:
        truncates: whether training samples from a truncated distribution.
        dtype: strategy.dtype.
        engine_dtype: rollout.engine_args.dtype, or None where there is none.
    """

    truncates: bool
    dtype: str
    engine_dtype: str | None


class Examination:
    """Of a run that is ready to train. All ranks take part.

    Args:
        trainer, stage: of the run; it takes one update, at learning rate 0.
        sampler: of the trainer.
        twin: a model like the policy that computes in the dtype of this name.
    """

    def __init__(
        self,
        trainer: Trainer,
        stage: Stage,
        sampler: OverridingSampler,
        facts: Facts,
        twin: Callable[[str], TrainableModel],
        chart: DoctorReport,
    ) -> None:
        self.trainer = trainer
        self.world = trainer.world
        self.stage = stage
        self.sampler = sampler
        self.facts = facts
        self.twin = twin
        self.chart = chart
        self.tolerance = TOLERANCE[facts.dtype]
        self.temperature = stage.source.temperature
        self.settled: Gap  # of greedy tokens and the true weights, before an update
        self.place = copy.deepcopy(self.world.gather(stage.source.state_dict()))

    def examine(self) -> float:
        """Prints what is found and returns the largest gap.

        Raises:
            ValueError: a check fails; names the cause, where one was found.
        """
        self.hand_over()
        name = "as training samples"
        if self.facts.truncates:
            meant = self.note(name, self.draw())
            said = "rollout.top_p, top_k, min_p or first_token are meant to make the gap of the whole distribution"
            self.chart.say(None, f"truncation: {said} {meant.largest:.2g}; algorithm/correction weighs it")
            self.sampler.plain, name = True, "without truncation"
        batch, again = self.draw(), self.draw()
        logprobs = self.score(batch)
        gap = self.chart.note(name, batch, logprobs)
        said = f"agreement: the largest gap is {gap.largest:.2g}; {self.facts.dtype} may have {self.tolerance:g}"
        agree = self.chart.say(gap.largest <= self.tolerance, said)
        self.seeds(batch, again)
        failed = [*self.weights(), *self.drift(), *self.rows(batch, logprobs), *self.prompt(batch)]
        if agree:
            self.chart.say(True, "temperature, template, rounding and dtype: there is no gap to explain")
        else:
            failed += self.causes(batch, logprobs, gap)
        self.chart.show(batch, logprobs, self.trainer.policy.tokenizer)
        if failed or not agree:
            raise ValueError(f"mode=doctor: {[*failed, self.unexplained()][0]}")
        return gap.largest

    def hand_over(self, factor: float = 1.0) -> None:
        """Gives the engine the policy's weights, as they are or scaled on their way."""
        weights = self.trainer.policy.weights()
        self.sampler.release()
        self.trainer.step += 1  # every hand-over is a version of its own
        if factor != 1.0:
            weights = ((name, tensor * factor) for name, tensor in weights)
        self.sampler.publish(self.trainer.step, weights)

    def draw(self) -> TensorDict:
        """The first batch of the training source, sampled now."""
        self.stage.source.load_state_dict(copy.deepcopy(self.place))
        batch = self.stage.source.next(Metrics())
        keep = batch["response_mask"].clone()
        keep[:, 0] = False  # nothing predicts the first token
        return batch.set("keep", keep)

    def greedy(self) -> TensorDict:
        """The same prompts answered with the most likely tokens, of which the engine tells at temperature 1."""
        self.sampler.greedy = True
        batch = self.draw()
        self.sampler.greedy = False
        return batch

    def score(self, batch: TensorDict, temperature: float | None = None, dtype: str | None = None) -> Tensor:
        """Log-probabilities of the trainer, (B, T)."""
        self.sampler.release()
        actor = self.trainer.policy if dtype in (None, self.facts.dtype) else self.twin(str(dtype))
        rows, heat = columns(batch), self.temperature if temperature is None else temperature
        return self.trainer.compute(actor, rows, rows, ("logprobs",), heat)["logprobs"]

    def note(self, what: str, batch: TensorDict, temperature: float | None = None) -> Gap:
        """The gap of a batch, as a line of the chart."""
        return self.chart.note(what, batch, self.score(batch, temperature))

    def weights(self) -> Iterator[str]:
        """Does the engine sample with what it was handed last?"""
        before = self.greedy()
        noise = self.moved(before, self.greedy())

        def shift(factor: float, what: str) -> float:
            self.hand_over(factor)
            sampled = self.greedy()
            self.settled = self.note(what, sampled, 1.0)
            return self.moved(before, sampled)

        changed = shift(SCALE, f"greedy, the engine's weights times {SCALE}")
        back = shift(1.0, "greedy, the true weights")
        follows, returns = changed > max(TOLERANCE["float32"], 3 * noise), back <= max(self.tolerance, 3 * noise)
        said = f"weights: made wrong they move the engine by {changed:.2g}; the true ones leave it {back:.2g} off"
        if not self.chart.say(follows and returns and back < changed, said):
            lack = "come back to the true ones" if follows else "follow what it is handed"
            yield f"the engine has stale weights, it does not {lack}: mend update_weights of rollout.engine._target_"

    def seeds(self, batch: TensorDict, again: TensorDict) -> None:
        """Does it sample the same again?"""
        pairs = zip(answers(batch), answers(again), strict=False)
        same = [equal for theirs in self.world.gather([one == other for one, other in pairs]) for equal in theirs]
        self.chart.say(None, f"seeds: asked again, {sum(same)} of {len(same)} rows have the same tokens")

    def drift(self) -> Iterator[str]:
        """Is the gap what it was after an update that changes nothing?"""
        self.hand_over()
        batch, metrics = self.draw(), Metrics()
        self.sampler.release()
        self.trainer.begin(0, self.stage, None)
        step = self.trainer.compute_columns(self.stage, batch, metrics)
        self.trainer.update(self.stage, self.stage.steps, batch, step)  # the policy trains in the last step
        self.hand_over()
        drifted = self.note("greedy, after an update at learning rate 0", self.greedy(), 1.0)
        before, after = self.settled.largest, drifted.largest
        said = f"drift: an update at learning rate 0 takes the largest gap from {before:.2g} to {after:.2g}"
        if not self.chart.say(after <= before + self.tolerance, said):
            yield "an update at learning rate 0 moves the gap: weights get lost between strategy and rollout.engine"

    def moved(self, one: TensorDict, other: TensorDict) -> float:
        """How far the engine's own log-probabilities moved, where a row is the same up to that token; inf: nowhere."""
        places = {unit: row for row, unit in enumerate(other["unit"].tolist())}
        pairs = [(row, places[unit]) for row, unit in enumerate(one["unit"].tolist()) if unit in places]
        width = min(one["keep"].shape[1], other["keep"].shape[1])
        mine, theirs = (columns(batch)[[pair[side] for pair in pairs]] for side, batch in enumerate((one, other)))
        ids, logprobs, keep = (
            (mine[name][:, :width], theirs[name][:, :width])
            for name in (("tokens", "input_ids"), "rollout_logprobs", "keep")
        )
        same = (ids[0] == ids[1]).cumprod(1).bool() & keep[0] & keep[1]
        apart = torch.cat(self.world.gather((logprobs[0] - logprobs[1]).abs()[same]))
        return float(apart.max()) if len(apart) else math.inf

    def rows(self, batch: TensorDict, logprobs: Tensor) -> Iterator[str]:
        """Does the score of a row depend on those beside it?"""
        self.sampler.release()
        count = min(ALONE, *self.world.gather(len(batch)))
        each = [columns(batch)[row : row + 1] for row in range(count)]
        alone = [self.trainer.policy.compute(row, ("logprobs",), self.temperature)["logprobs"] for row in each]
        apart = max(self.world.gather(float((torch.cat(alone) - logprobs[:count]).abs().max())))
        said = f"padding and packing: rows scored alone ({count} of each rank) are {apart:.2g} off"
        if not self.chart.say(apart <= self.tolerance, said):
            yield "a row's score depends on its neighbours: set actor.packing=false and actor.share_prefix=false"

    def prompt(self, batch: TensorDict) -> Iterator[str]:
        """Does what was sent begin twice?"""
        tokenizer, ids = self.trainer.policy.tokenizer, batch["tokens", "input_ids"]
        begin = tokenizer.bos_token_id
        twice = begin is not None and any(self.world.gather(bool((ids[:, :2] == begin).all(1).any())))
        sent = ids[0, : int(batch["response_mask"][0].int().argmax())]
        text = tokenizer.decode(sent)
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        said = f"prompt: {'two begin tokens' if twice else 'nothing doubled'} in what was sent, {len(sent)} tokens: "
        if not self.chart.say(not twice, f"{said}{shown!r}"):
            yield "prompts begin with two begin tokens: take one out of the chat template, or set data.template=none"

    def causes(self, batch: TensorDict, logprobs: Tensor, gap: Gap) -> list[str]:
        """What takes the gap away, if anything does: the likeliest cause, with its cure."""
        begin = self.trainer.policy.tokenizer.bos_token_id
        suspect = Suspect(columns(batch), logprobs, self.score, self.temperature, self.facts.dtype, begin)
        tried = sorted(suspect.tried(self.chart, self.world.gather), key=lambda suspicion: suspicion.gap.mean)
        named = [suspicion for suspicion in tried if suspicion.explains(gap)][:1]
        for kind in sorted({suspicion.kind for suspicion in tried}):
            best = next(suspicion for suspicion in [*named, *tried] if suspicion.kind == kind)
            verdict = "this explains it" if best in named else "this is not it"
            said = f"{kind}: {best.trial}, with a largest gap of {best.gap.largest:.2g}: {verdict}"
            self.chart.say(best not in named, said)
        return [suspicion.cure for suspicion in named]

    def unexplained(self) -> str:
        """What is said of a gap that nothing takes away."""
        ours, theirs = self.facts.dtype, self.facts.engine_dtype
        if theirs not in (None, ours):
            return f"rollout.engine_args.dtype={theirs} is not strategy.dtype={ours}, and nothing else explains the gap"
        return "trainer and engine disagree, and nothing that was tried takes the gap away; see the worst tokens"


def columns(batch: TensorDict) -> TensorDict:
    """What is needed to score a batch."""
    return batch.select("tokens", "response_mask", "rollout_logprobs", "group", "unit", "keep")


def answers(batch: TensorDict) -> list[list[int]]:
    """The sampled tokens of every row."""
    pairs = zip(batch["tokens", "input_ids"], batch["response_mask"], strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]
