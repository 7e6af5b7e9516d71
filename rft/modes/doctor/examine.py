"""Compares the engine's log-probabilities of its tokens with the trainer's, and finds the cause of a difference.

For every known cause the trainer computes the log-probabilities in another way, or the engine gets other weights, and
the gap is measured again. Two causes at once are not searched: the table shows their gap, but no message names them.
"""

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.base import TrainableModel
from rft.actor.lora.base import LoraWeights
from rft.algorithm.divergence import TOLERANCE
from rft.algorithm.roles import POLICY
from rft.batch.collate import collate
from rft.errors import listed
from rft.metrics import Metrics
from rft.modes.doctor.causes import CauseSearch, turned_off
from rft.modes.doctor.overriding_sampler import OverridingSampler
from rft.modes.doctor.report import DoctorReport, Gap
from rft.rollout.source.rollout import RolloutSource
from rft.setup.assembly import Job
from rft.train.stage import Stage
from rft.train.trainer import Trainer

SCALE = 1.1  # factor of the scaled weights, which must change what the engine computes
CHANGE, OFFSET, WAVES = 0.2, 1e-3, 1e3  # of changed tensors: relative and absolute change, radians per unit of value
ALONE = 8  # rows that are scored one by one, at most
UPDATES = 4  # that arrive while a batch is sampled, about
SHOWN = 60  # characters of a prompt that are printed


@dataclass(eq=False)
class Examination:
    """Examines a run that is ready to train. Methods that sample or compute are collectives.

    Args:
        job: the run.
        trainer, stage: those of the run; the examination takes one update, at learning rate 0.
        twin: makes a copy of the policy that computes in the dtype of this name, without the options of `rounds`.
        report: collects the findings.

    Attributes:
        dtype: in which the trainer computes.
        rounds: see `Strategy.rounding_options`.
        before_update: the gap of greedy tokens with the policy's weights.
    """

    job: Job
    trainer: Trainer
    stage: Stage
    twin: Callable[[str], TrainableModel]
    report: DoctorReport
    before_update: Gap = field(init=False)

    def __post_init__(self) -> None:
        strategy = self.job.strategy.options
        assert isinstance(self.trainer.sampler, OverridingSampler)
        self.world, self.sampler = self.trainer.world, self.trainer.sampler
        self.dtype, self.rounds = strategy.compute_dtype(), strategy.rounding_options()
        self.tolerance = TOLERANCE[self.dtype]
        self.temperature = self.stage.source.temperature
        self.position = copy.deepcopy(self.stage.source.state_dict())

    def examine(self) -> float:
        """Prints the report and returns the largest gap.

        Raises:
            ValueError: a check fails; names the cause if one was found.
        """
        self.publish()
        name = "as training samples"
        truncates = self.job.run.rollout.truncates()
        truncated = self.draw() if truncates else None
        self.sampler.plain = truncates
        batch, again, greedy = self.draw(), self.draw(), (self.greedy(), self.greedy())
        if truncated is not None:  # scored after all sampling: the engine sleeps while the trainer computes
            expected = self.add_gap(name, truncated)
            text = "rollout.top_p, top_k, min_p or first_token change the sampled distribution, which makes a gap of"
            self.report.add_check(None, f"truncation: {text} {expected.largest:.2g}; algorithm/correction corrects it")
            name = "without truncation"
        logprobs = self.score(batch)
        gap = self.report.add_gap(name, batch, logprobs)
        text = f"agreement: the largest gap is {gap.largest:.2g}; {self.dtype} allows {self.tolerance:g}"
        agree = self.report.add_check(gap.largest <= self.tolerance, text)
        self.seeds(batch, again)
        if self.job.processor is not None and self.job.engine.factory.facts.has_processor:  # else `draw` has raised
            text = "media: the engine has expanded all prompts to the tokens that the trainer reads"
            self.report.add_check(True, text)
        failed = [*self.weights(*greedy), *self.drift(), *self.versions()]
        failed += [*self.rows(batch, logprobs), *self.prompt(batch)]
        if agree and not failed:
            failed += self.tensors()
        if agree:
            text = "temperature, template, rounding, options and dtype: there is no gap to explain"
            self.report.add_check(True, text)
        else:
            failed += self.causes(batch, logprobs, gap)
        self.report.print(batch, logprobs, self.trainer.policy.tokenizer)
        if failed or not agree:
            raise ValueError(f"mode=doctor: {[*failed, self.unexplained()][0]}")
        return gap.largest

    def publish(self, factor: float = 1.0) -> None:
        """Publishes the policy's weights times a factor."""
        weights = self.trainer.policy.weights(self.sampler.gather_options)
        self.sampler.release()
        self.trainer.step += 1  # every publication needs a new version
        if factor != 1.0:
            weights = ((name, tensor * factor) for name, tensor in weights)
        self.sampler.publish(self.trainer.step, weights)

    def draw(self) -> TensorDict:
        """The first batch of the training source, sampled with the current weights."""
        self.stage.source.load_state_dict(copy.deepcopy(self.position))
        batch = self.stage.source.next(Metrics())
        return batch.set("loss_mask", sampled_mask(batch))

    def greedy(self) -> TensorDict:
        """The first batch, sampled greedily, with log-probabilities at temperature 1."""
        self.sampler.greedy = True
        batch = self.draw()
        self.sampler.greedy = False
        return batch

    def score(self, batch: TensorDict, temperature: float | None = None, dtype: str | None = None) -> Tensor:
        """The trainer's log-probabilities of a batch, (B, T)."""
        temperature = self.temperature if temperature is None else temperature
        actor = self.trainer.policy if dtype in (None, self.dtype) else self.twin(str(dtype))
        return self.score_by(actor, batch, temperature)

    def score_plainly(self, batch: TensorDict) -> Tensor:
        """The same, computed in the dtype of the trainer without the options of `rounds`."""
        return self.score_by(self.twin(self.dtype), batch, self.temperature)

    def score_by(self, actor: TrainableModel, batch: TensorDict, temperature: float) -> Tensor:
        """The log-probabilities of a batch by an actor, (B, T)."""
        self.sampler.release()
        rows = columns(batch)
        step = self.trainer.step_context(self.stage, rows, Metrics())
        step = replace(step, models={POLICY: actor}, temperature=temperature)
        return step.compute(POLICY, rows, ("logprobs",))["logprobs"]

    def add_gap(self, name: str, batch: TensorDict, temperature: float | None = None) -> Gap:
        """Adds the gap of a batch to the report."""
        return self.report.add_gap(name, batch, self.score(batch, temperature))

    def weights(self, before: TensorDict, again: TensorDict) -> Iterator[str]:
        """Checks that the engine samples with the weights that were published last: scaled ones, then the policy's.

        Args:
            before, again: two greedy batches with the policy's weights.
        """
        noise = self.difference(before, again)

        def shift(factor: float, name: str) -> float:
            self.publish(factor)
            sampled = self.greedy()
            self.before_update = self.add_gap(name, sampled, 1.0)
            return self.difference(before, sampled)

        scaled = shift(SCALE, f"greedy, the engine's weights times {SCALE}")
        restored = shift(1.0, "greedy, the policy's weights")
        follows, returns = scaled > max(TOLERANCE["float32"], 3 * noise), restored <= max(self.tolerance, 3 * noise)
        text = (
            f"weights: scaled ones change the engine by {scaled:.2g}; the policy's restore it to within {restored:.2g}"
        )
        if not self.report.add_check(follows and returns and restored < scaled, text):
            failure = "return to the policy's weights" if follows else "use the weights that it receives"
            yield f"the engine has stale weights, it does not {failure}: fix update_weights of rollout.engine._target_"

    def tensors(self) -> Iterator[str]:
        """Checks that the engine takes over every tensor: the policy holds changed ones while the two are compared."""
        policy = self.trainer.policy
        names, tensors = [name for name, _ in policy.weights()], list(policy.own_tensors())
        if isinstance(policy.weights(), LoraWeights) or len(names) != len(tensors):
            return  # the engine gets other tensors than the policy has
        pairs = zip(names, tensors, strict=True)
        named = [(name, tensor) for name, tensor in pairs if tensor.is_floating_point()]
        largest = self.changed_gap(named)
        text = f"tensors: with all {len(named)} tensors changed the largest gap is {largest:.2g}"
        if not self.report.add_check(largest <= self.tolerance, text):
            shown = listed(self.stale(named)) or "no single one shows it"
            yield f"the engine does not take over all tensors ({shown}): fix update_weights of rollout.engine._target_"

    def stale(self, named: list[tuple[str, Tensor]]) -> list[str]:
        """The names of the tensors that the engine does not take over, found by halving."""
        if not named or self.changed_gap(named) <= self.tolerance:
            return []
        half = len(named) // 2
        return self.stale(named[:half]) + self.stale(named[half:]) if half else [named[0][0]]

    @torch.no_grad()
    def changed_gap(self, named: list[tuple[str, Tensor]]) -> float:
        """The largest gap of greedy tokens while the policy holds other values in these tensors."""
        kept = [tensor.clone() for _, tensor in named]
        for (_, tensor), before in zip(named, kept, strict=True):
            wave = (before.float() * WAVES).sin()  # a function of the value, so that copies of a tensor stay equal
            tensor.copy_(before * (1 + CHANGE * wave) + OFFSET * wave.cos())
        self.publish()
        sampled = self.greedy()
        gaps = (self.score(sampled, 1.0).double() - sampled["rollout_logprobs"])[sampled["loss_mask"]].abs()
        for (_, tensor), before in zip(named, kept, strict=True):
            tensor.copy_(before)
        return float(torch.cat(self.world.gather(gaps)).max())

    def seeds(self, batch: TensorDict, again: TensorDict) -> None:
        """Reports how many rows are the same when the requests are repeated."""
        pairs = zip(answers(batch), answers(again), strict=False)
        equal = self.world.gather([one == other for one, other in pairs])
        same = [row for rank_rows in equal for row in rank_rows]
        self.report.add_check(None, f"seeds: sampled again, {sum(same)} of {len(same)} rows have the same tokens")

    def drift(self) -> Iterator[str]:
        """Checks that an update at learning rate 0 does not change the gap."""
        self.publish()
        batch, metrics = self.draw(), Metrics()
        self.sampler.release()
        self.trainer.begin(0, self.stage, None)
        step = self.trainer.compute_columns(self.stage, batch, metrics)
        self.trainer.update(self.stage, self.stage.steps, batch, step)  # the policy trains in the last step
        self.publish()
        drifted = self.add_gap("greedy, after an update at learning rate 0", self.greedy(), 1.0)
        before, after = self.before_update.largest, drifted.largest
        text = f"drift: an update at learning rate 0 changes the largest gap from {before:.2g} to {after:.2g}"
        if not self.report.add_check(after <= before + self.tolerance, text):
            yield "an update at learning rate 0 changes the gap: weights are lost between strategy and rollout.engine"

    def versions(self) -> Iterator[str]:
        """Checks, where a run samples ahead, that each token has the log-probability of the weights of its version.

        Scaled weights and the policy's arrive in turn while a batch is sampled; tokens of the policy's are compared.
        """
        if not self.job.run.rollout.staleness:
            return
        batch, own, updates = self.draw_while_updating()
        version, sampled = batch["version"], batch["loss_mask"]
        first = version.masked_fill(~sampled, self.trainer.step).amin(1, keepdim=True)  # (B, 1)
        ours, logprobs, gaps = sampled & torch.isin(version, own), self.score(batch), dict[str, float]()
        for place, mask in (("before", ours & (version == first)), ("behind", ours & (version > first))):
            if sum(self.world.gather(int(mask.sum()))):
                name = f"while weights arrive, {place} the first update of an answer"
                gaps[place] = self.report.add_gap(name, batch.clone().set("loss_mask", mask), logprobs).largest
        found = " and ".join(f"{gap:.2g} {place} the first update of an answer" for place, gap in gaps.items())
        text = f"versions: while weights changed {updates} times, the largest gap is {found or 'unknown'}"
        if self.report.add_check(max(gaps.values(), default=0.0) <= self.tolerance, text):
            return
        if gaps.get("before", 0.0) > self.tolerance:
            fault = "stamps tokens with weights that did not sample them: fix Completion.versions of"
        else:
            fault = "continues with keys and values of older weights behind an update: fix update_weights of"
        yield f"the engine {fault} rollout.engine._target_, or set rollout.staleness=0"

    def draw_while_updating(self) -> tuple[TensorDict, Tensor, int]:
        """Samples the first batch while other weights arrive.

        Returns:
            The batch, the versions (V,) of the policy's weights, and how often weights arrived.
        """
        self.publish(SCALE)  # first, so that one update is enough for tokens of the policy behind it
        started = time.perf_counter()
        self.draw()
        pause, source = (time.perf_counter() - started) / UPDATES, self.stage.source
        assert isinstance(source, RolloutSource)
        source.load_state_dict(copy.deepcopy(self.position))
        updates, own = 0, list[int]()
        with ThreadPoolExecutor(1, "draw") as threads:
            drawing = threads.submit(source.draw, Metrics())  # no collective, as this thread calls them
            while not all(self.world.gather(drawing.done())):
                wait([drawing], timeout=pause)
                updates += 1
                self.publish(1.0 if updates % 2 else SCALE)
                own += [self.trainer.step] if updates % 2 else []
        batch = collate(list(itertools.chain(*drawing.result())))
        self.publish()
        return batch.set("loss_mask", sampled_mask(batch)), torch.tensor(own), updates

    def difference(self, one: TensorDict, other: TensorDict) -> float:
        """The largest difference of the engine's log-probabilities between two batches, over the common beginnings of
        their rows; inf if there are none."""
        row_of = {unit: row for row, unit in enumerate(other["unit"].tolist())}
        pairs = [(row, row_of[unit]) for row, unit in enumerate(one["unit"].tolist()) if unit in row_of]
        width = min(one["loss_mask"].shape[1], other["loss_mask"].shape[1])
        first, second = (columns(batch)[[pair[side] for pair in pairs]] for side, batch in enumerate((one, other)))
        ids, logprobs, keep = (
            (first[name][:, :width], second[name][:, :width])
            for name in (("tokens", "input_ids"), "rollout_logprobs", "loss_mask")
        )
        same = (ids[0] == ids[1]).cumprod(1).bool() & keep[0] & keep[1]
        differences = torch.cat(self.world.gather((logprobs[0] - logprobs[1]).abs()[same]))
        return float(differences.max()) if len(differences) else math.inf

    def rows(self, batch: TensorDict, logprobs: Tensor) -> Iterator[str]:
        """Checks that the score of a row does not depend on the other rows."""
        self.sampler.release()
        count = min(ALONE, *self.world.gather(len(batch)))
        each = [columns(batch)[row : row + 1] for row in range(count)]
        alone = [self.trainer.policy.compute(row, ("logprobs",), self.temperature)["logprobs"] for row in each]
        difference = max(self.world.gather(float((torch.cat(alone) - logprobs[:count]).abs().max())))
        text = f"padding and packing: rows scored alone ({count} of each rank) differ by {difference:.2g}"
        if not self.report.add_check(difference <= self.tolerance, text):
            first = f"{turned_off(self.rounds)}, or " if self.rounds else ""
            cure = f"set {first}actor.packing=false and actor.share_prefix=false"
            yield f"the score of a row depends on the other rows: {cure}"

    def prompt(self, batch: TensorDict) -> Iterator[str]:
        """Checks that prompts do not begin with two BOS tokens."""
        tokenizer, ids = self.trainer.policy.tokenizer, batch["tokens", "input_ids"]
        begin = tokenizer.bos_token_id
        twice = begin is not None and any(self.world.gather(bool((ids[:, :2] == begin).all(1).any())))
        sent = ids[0, : int(batch["response_mask"][0].int().argmax())]
        prompt = tokenizer.decode(sent)
        shown = prompt if len(prompt) <= SHOWN else f"{prompt[:SHOWN]}..."
        text = f"prompt: {'two BOS tokens' if twice else 'no repeated BOS'} in the sent prompt of {len(sent)} tokens: "
        if not self.report.add_check(not twice, f"{text}{shown!r}"):
            yield "prompts begin with two BOS tokens: remove one from the chat template, or set data.template=none"

    def causes(self, batch: TensorDict, logprobs: Tensor, gap: Gap) -> list[str]:
        """Tries all causes; returns the cure of the one that explains the gap best, if there is one."""
        begin = self.trainer.policy.tokenizer.bos_token_id
        search = CauseSearch(
            columns(batch), logprobs, self.score, self.score_plainly, self.rounds, self.temperature, self.dtype, begin
        )
        tried = sorted(search.run(self.report, self.world.gather), key=lambda cause: cause.gap.mean)
        named = [cause for cause in tried if cause.explains(gap)][:1]
        for kind in sorted({cause.kind for cause in tried}):
            best = next(cause for cause in [*named, *tried] if cause.kind == kind)
            verdict = "this explains the gap" if best in named else "this is not the cause"
            text = f"{kind}: {best.trial}, with a largest gap of {best.gap.largest:.2g}: {verdict}"
            self.report.add_check(best not in named, text)
        return [cause.cure for cause in named]

    def unexplained(self) -> str:
        """The message for a gap that no cause explains."""
        engine_dtype = self.job.engine_dtype()
        if engine_dtype != self.dtype:
            return (
                f"the engine computes in {engine_dtype}, which is not strategy.dtype={self.dtype}, and no other cause "
                "explains the gap"
            )
        return "trainer and engine disagree, and no known cause explains the gap; see the worst tokens"


def sampled_mask(batch: TensorDict) -> Tensor:
    """The tokens that are compared, (B, T) bool."""
    keep = batch["response_mask"].clone()
    keep[:, 0] = False  # nothing predicts the first token
    return keep


def columns(batch: TensorDict) -> TensorDict:
    """The columns that are needed to score a batch."""
    needed = ("tokens", "response_mask", "rollout_logprobs", "group", "unit", "loss_mask")
    return batch.select(*needed, "media", strict=False)  # a batch of text has no media


def answers(batch: TensorDict) -> list[list[int]]:
    """The sampled tokens of every row."""
    pairs = zip(batch["tokens", "input_ids"], batch["response_mask"], strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]
