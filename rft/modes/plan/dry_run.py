"""Goes through the stages of a run on hollow tensors and takes down what they hold."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from rft.actor.actor import Actor
from rft.actor.init import init_without_loading
from rft.actor.packing.micro_batches import MicroBatch
from rft.actor.precomputed import PrecomputedReference
from rft.algorithm.roles import POLICY
from rft.metrics import Metrics
from rft.modes.plan.memory_tracker import MemoryTracker
from rft.modes.plan.skip_compute import SkipCompute
from rft.modes.plan.stubs import FirstCuts, StubSampler, Texts
from rft.rollout.engine.base import Request
from rft.rollout.engine.kv_cache import capacity
from rft.rollout.engine.sampling import Sampling
from rft.train.stage import Stage
from rft.train.trainer import Trainer

LENGTHS_TRIED = 6  # of answers, to find those that fill a forward


class DryRun:
    """Takes the steps of a trainer whose models have no numbers.

    Args:
        trainer: made while `tracker` was watching.
        texts: how long rows are; it is changed.
        hollow, tracker: active.

    Attributes:
        rows: of the last stage's batches.
        micro_batches: of the last stage's optimizer steps, where all rows are the longest.
        fullest: tokens of the last stage's largest forward.
    """

    def __init__(self, trainer: Trainer, texts: Texts, hollow: SkipCompute, tracker: MemoryTracker) -> None:
        self.rows = self.micro_batches = self.fullest = 0
        self._trainer = trainer
        self._texts = texts
        self._hollow = hollow
        self._tracker = tracker
        self._longest = texts.answer_tokens
        assert isinstance(trainer.sampler, StubSampler)
        self._sampler = trainer.sampler
        self._version = 0  # of the weights that are published next
        assert isinstance(trainer.policy, Actor)
        self.policy = trainer.policy
        self._cuttings = []  # of the actors that have one: a reference may be the policy itself
        for actor in trainer.models.values():
            vars(actor)["compute"] = self._with_numbers(actor.compute)
            if isinstance(actor, Actor):
                self._cuttings.append((actor, actor.micro_batcher))

    def begin(self, stage: Stage) -> None:
        """What comes before the first stage: a reference that is computed ahead, then the engine's first weights.

        Args:
            stage: that reads the reference, if there is one.
        """
        reference = self._trainer.models.get("reference")
        if isinstance(reference, PrecomputedReference) and not reference.copied:
            self._remember(reference, stage)
        self._sync("begin")

    def through(self, number: int, stage: Stage, parts: int) -> None:
        """Two steps of a stage: in the second one there is everything that stays from step to step.

        Args:
            number: of the stage.
            parts: optimizer steps that the rows of one batch of its source are enough for.
        """
        trainer, tracker = self._trainer, self._tracker
        own = {name: name if stage.name == "train" else stage.name for name in ("annotate", "update", "sync")}
        few = replace(stage, minibatches=min(stage.minibatches, parts), epochs=1)
        with tracker.stage("begin"):
            trainer.begin(number, stage, None)
        self._fill_forwards(few)
        with self._optimizers():
            for limit in (1, 2):
                for actor, micro_batcher in self._cuttings:
                    actor.micro_batcher = FirstCuts(**asdict(micro_batcher), limit=limit)
                metrics = Metrics()
                batch = stage.source.next(metrics)
                tracker.assign("batch", _tensors(batch))
                with tracker.stage(own["annotate"]):
                    step = trainer.compute_columns(stage, batch, metrics)
                tracker.assign("batch", _tensors(batch))
                with tracker.stage(own["update"]):
                    trainer.update(few, stage.steps, batch, step)
                self._sync(own["sync"])
        self._texts.answer_tokens = self._longest
        for actor, micro_batcher in self._cuttings:
            actor.micro_batcher = micro_batcher

    def sample(self, name: str, prompts: int, sampling: Sampling, samples: int) -> None:
        """The engine reads all prompts and draws the first token of each answer."""
        requests = [Request([0] * self._texts.prompt_tokens, list(range(samples)))] * prompts
        with self._tracker.stage(name):
            self._sampler.own.generate(requests, replace(sampling, max_new_tokens=1))

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of every term at the fullest moment of each stage; the cache of the engine is as it is at the end."""
        for key, actor in self._trainer.models.items():
            if key != POLICY:
                self._tracker.assign("other models", actor.own_tensors())
        self._tracker.assign("weights", self.policy.own_tensors())
        found = self._tracker.peaks()
        prompt, longest = self._texts.prompt_tokens, self._longest
        for terms in found.values():
            if "kv cache" in terms:
                terms["kv cache"] = terms["kv cache"] * capacity(prompt, longest) // capacity(prompt, 1)
        return found

    def _remember(self, reference: PrecomputedReference, stage: Stage) -> None:
        self._fill_forwards(stage)
        batch = stage.source.next(Metrics())
        stage.algorithm.build_loss_mask(batch)
        with self._tracker.stage("reference"):
            with self._hollow.creating(), init_without_loading():
                model = reference.load()
            assert isinstance(model, Actor)
            model.micro_batcher = FirstCuts(**asdict(model.micro_batcher), limit=1)
            self._trainer.compute(model, batch, batch, ("logprobs",), stage.source.temperature)
        self._tracker.assign("other models", model.own_tensors())
        del model
        gc.collect()
        vars(reference)["compute"] = lambda rows, *_: {"logprobs": torch.zeros(rows["loss_mask"].shape)}
        self._texts.answer_tokens = self._longest

    def _fill_forwards(self, stage: Stage) -> None:
        """Makes answers as long as fills a forward best: in a run, rows of many lengths will do so."""
        policy, tokens = self.policy, dict[int, int]()
        for answer in self._lengths():
            self._texts.answer_tokens = answer
            batch = stage.source.next(Metrics())
            stage.algorithm.build_loss_mask(batch)
            rows = batch[: max(1, len(batch) // stage.minibatches)]
            micros = policy.micro_batcher.micro_batches(rows, rows[:1], self._trainer.world, policy.strategy.context)
            cuts = [_computed(micro) for micro in micros]
            tokens[answer] = max(cuts)
            if answer == self._longest:
                self.micro_batches = len(cuts)
                self.rows = len(batch)
        self._texts.answer_tokens = max(tokens, key=lambda answer: (tokens[answer], answer))
        self.fullest = max(tokens.values())

    def _lengths(self) -> list[int]:
        """The longest answer, and some with which so many rows take as many tokens as a forward has."""
        policy, prompt = self.policy, self._texts.prompt_tokens
        context = policy.strategy.context
        most = policy.micro_batcher.max_tokens * (1 if context is None else context.size)
        lengths = {self._longest}
        for rows in range(1, most // (prompt + 1) + 1):
            prompts = {rows, 1} if policy.micro_batcher.share_prefix else {rows}
            lengths |= {(most - count * prompt) // rows for count in prompts}
        return sorted((n for n in lengths if 0 < n <= self._longest), reverse=True)[:LENGTHS_TRIED]

    def _sync(self, stage: str) -> None:
        trainer, tracker = self._trainer, self._tracker

        def seen() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in trainer.policy.weights():
                tracker.assign("engine", [tensor])
                yield name, tensor

        with tracker.stage(stage):
            self._sampler.publish(self._version, seen())
            self._version += 1

    def _with_numbers(self, compute: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
        """What an actor computes is zero, so that the rest of the step has numbers to work with."""

        def computed(*arguments: Any, **options: Any) -> dict[str, Tensor]:
            columns = compute(*arguments, **options)
            self._hollow.fill(columns.values())
            return columns

        return computed

    @contextmanager
    def _optimizers(self) -> Iterator[None]:
        """Takes down what is a gradient and what the state of an optimizer."""

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._tracker.assign("gradients", [p.grad for p in parameters if p.grad is not None])

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            leaves = tree_leaves(list(optimizer.state.values()))
            self._tracker.assign("optimizer", [leaf for leaf in leaves if isinstance(leaf, Tensor)])

        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _tensors(batch: TensorDict) -> list[Tensor]:
    return list(batch.exclude("fields").values(include_nested=True, leaves_only=True))


def _computed(micro: MicroBatch) -> int:
    """Tokens of this rank's forward."""
    if micro.layout is None or micro.layout.shard is None:
        return micro.computed
    return len(micro.layout.shard.tokens["position_ids"])
