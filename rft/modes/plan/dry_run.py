"""Runs two steps of every stage of a run on placeholders while the memory tracker records what they hold."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from rft.actor.actor import Actor
from rft.actor.init import init_without_loading
from rft.actor.loading.export import file_layout, fill_files
from rft.actor.packing.micro_batches import MicroBatch
from rft.actor.reference import PrecomputedReference
from rft.algorithm.roles import POLICY
from rft.metrics import Metrics
from rft.modes.plan.hooks import PlanHooks
from rft.modes.plan.memory_tracker import MemoryTracker
from rft.modes.plan.skip_compute import SkipCompute
from rft.modes.plan.stubs import StubEncoder, StubSampler
from rft.reward.models.base import ModelTerm
from rft.rollout.engine.base import Request
from rft.rollout.engine.kv_cache import capacity
from rft.rollout.engine.sampling import Sampling
from rft.strategy.base import HOST
from rft.strategy.gather import to_local
from rft.train.checkpoint.shards import largest_file
from rft.train.checkpoint.tree import split
from rft.train.stage import Stage
from rft.train.trainer import Trainer

SERIALIZED = 2  # times that the safetensors library holds a file that it writes as bytes
LENGTHS_TRIED = 6  # answer lengths that are tried to fill a forward


@dataclass(eq=False)
class DryRun:
    """Takes steps with a trainer whose models hold placeholders.

    Args:
        trainer: built under `skip` and `tracker`; its models have `hooks`.
        encoder: sets the length of all rows; the dry run changes it.
        skip, tracker: the active modes.
        hooks: the hooks of the models.
        sharded_terms: the terms of the reward whose models are spread over the ranks; not loaded yet.
        export_dtype: see `TrainableModel.save_model`.

    Attributes:
        policy: the policy of the trainer.
        rows: number of rows in a batch of the last stage.
        micro_batches: micro-batches in an optimizer step of the last stage if all rows have the maximal length.
        fullest: tokens of the largest forward of the last stage.

    Raises:
        ValueError: the policy does not compute in micro-batches of rows.
    """

    trainer: Trainer
    encoder: StubEncoder
    skip: SkipCompute
    tracker: MemoryTracker
    hooks: PlanHooks
    sharded_terms: Sequence[ModelTerm]
    export_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        policy, sampler = self.trainer.policy, self.trainer.sampler
        if not isinstance(policy, Actor):
            raise ValueError(
                f"actor._target_: mode=plan cannot follow a {type(policy).__name__}; it plans for an Actor"
            )
        assert isinstance(sampler, StubSampler)
        self.policy, self._sampler, self._longest = policy, sampler, self.encoder.answer_tokens
        self.rows = self.micro_batches = self.fullest = 0
        self._staged = WeakIdKeyDictionary()  # copies of a checkpoint, which live as long as the storages copied
        self._version = 0  # version of the weights that are published next

    def begin(self, stage: Stage) -> None:
        """Runs what precedes the first stage: precomputing the reference, then publishing the first weights.

        Args:
            stage: the stage that reads the reference.
        """
        reference = self.trainer.models.get("reference")
        if isinstance(reference, PrecomputedReference) and not reference.copied:
            self._precompute(reference, stage)
        self._publish("begin")

    def run_stage(self, number: int, stage: Stage, updates: int, saves: bool) -> None:
        """Runs two steps of a stage: in the second one all state that persists from step to step exists.

        Args:
            number: the index of the stage.
            updates: optimizer steps to take with the rows of one batch of its source.
            saves: a checkpoint is written after the first step.
        """
        trainer, tracker = self.trainer, self.tracker
        names = {name: _stage_name(stage, name) for name in ("columns", "update", "publish")}
        short = replace(stage, minibatches=min(stage.minibatches, updates), epochs=1)
        with tracker.stage("begin"):
            trainer.begin(number, stage, None)
        self._score()
        self._fill_forwards(short)
        with self._optimizer_hooks():
            for self.hooks.limit in (1, 2):
                metrics = Metrics()
                batch = stage.source.next(metrics)
                self._sampler.release()
                tracker.assign("batch", _tensors(batch))
                with tracker.stage(names["columns"]):
                    step = trainer.compute_columns(stage, batch, metrics)
                tracker.assign("batch", _tensors(batch))
                with tracker.stage(names["update"]):
                    trainer.update(short, stage.steps, batch, step)
                self._publish(names["publish"])
                if saves and self.hooks.limit == 1:
                    self.save(number, stage)
        self._score()
        self.encoder.answer_tokens = self._longest
        self.hooks.limit = None

    def save(self, number: int, stage: Stage) -> None:
        """Exports the model and copies the states of all models, as a checkpoint of the stage does."""
        with self.tracker.stage(_stage_name(stage, "export")):
            self._export()
        with self.tracker.stage(_stage_name(stage, "save")):
            self._stage_states(self.trainer.model_states(number, stage, 1))

    def sample(self, name: str, prompts: int, sampling: Sampling, samples: int) -> None:
        """The engine reads all prompts and samples two tokens of each answer: behind the prompt, and in a decode step.

        Args:
            name: the name of the stage.
            prompts: number of prompts of this rank.
            samples: number of samples of each prompt.
        """
        requests = [Request([0] * self.encoder.prompt_tokens, list(range(samples)))] * prompts
        with self.tracker.stage(name):
            self._sampler.engine.generate(requests, replace(sampling, max_new_tokens=2))
        self._sampler.release()
        self._send_weights()  # a checkpoint follows new weights, not samples

    def _score(self) -> None:
        """Computes the fullest forward of each sharded reward model; the first time loads it."""
        for term in self.sharded_terms:
            with self.tracker.stage("reward"):
                with self.skip.creating(), init_without_loading():
                    term.load()
                term.compute_fullest(self.encoder.prompt_tokens + self._longest)

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of every term at the peak of each stage; the key-value cache has its final size."""
        for key, model in self.trainer.models.items():
            if key != POLICY:
                trains = model.optimizer_options is not None
                self.tracker.assign(self._term("other models", trains), model.own_tensors())
        self.tracker.assign(self._term("weights"), self.policy.own_tensors())
        for term in self.sharded_terms:
            self.tracker.assign(f"reward models{HOST}" if term.offloaded else "reward models", term.weights())
        peaks = self.tracker.peaks()
        prompt, longest = self.encoder.prompt_tokens, self._longest
        for terms in peaks.values():
            if "kv cache" in terms:
                terms["kv cache"] = terms["kv cache"] * capacity(prompt, longest) // capacity(prompt, 1)
        return peaks

    def _term(self, name: str, trains: bool = True) -> str:
        """The term of weights, gradients or optimizer state of a model, on the device or in host memory."""
        return f"{name}{HOST}" if self.policy.strategy.offloads(trains) else name

    def _precompute(self, reference: PrecomputedReference, stage: Stage) -> None:
        self._fill_forwards(stage)
        batch = stage.source.next(Metrics())
        stage.algorithm.build_loss_mask(batch)
        self.hooks.limit = 1
        with self.tracker.stage("reference"):
            with self.skip.creating(), init_without_loading():
                model = reference.load()
            step = self.trainer.step_context(stage, batch, Metrics())
            replace(step, models={reference.key: model}).compute(reference.key, batch, ("logprobs",))
        self.tracker.assign(self._term("other models", trains=False), model.own_tensors())
        del model
        gc.collect()  # the parts of a sharded model refer to each other
        self.hooks.limit = None
        self.hooks.blank.append(reference)  # from now on a run reads the file
        self.encoder.answer_tokens = self._longest

    def _fill_forwards(self, stage: Stage) -> None:
        """Sets the answer length that fills a forward best, since the rows of different lengths in a run fill it."""
        policy, tokens = self.policy, dict[int, int]()
        for answer in self._lengths():
            self.encoder.answer_tokens = answer
            batch = stage.source.next(Metrics())
            stage.algorithm.build_loss_mask(batch)
            rows = batch[: max(1, len(batch) // stage.minibatches)]
            made = policy.micro_batcher.micro_batches(rows, rows[:1], self.trainer.world, policy.strategy.context)
            sizes = [_tokens_here(micro) for micro in made]
            tokens[answer] = max(sizes)
            if answer == self._longest:
                self.micro_batches = len(sizes)
                self.rows = len(batch)
        self.encoder.answer_tokens = max(tokens, key=lambda answer: (tokens[answer], answer))
        self.fullest = max(tokens.values())

    def _lengths(self) -> list[int]:
        """The longest answer, and lengths with which a number of rows fills a forward exactly."""
        policy, prompt = self.policy, self.encoder.prompt_tokens
        context = policy.strategy.context
        most = policy.micro_batcher.max_tokens * (1 if context is None else context.size)
        lengths = {self._longest}
        for rows in range(1, most // (prompt + 1) + 1):
            prompts = {rows, 1} if policy.micro_batcher.share_prefix else {rows}
            lengths |= {(most - count * prompt) // rows for count in prompts}
        return sorted((n for n in lengths if 0 < n <= self._longest), reverse=True)[:LENGTHS_TRIED]

    def _publish(self, stage: str) -> None:
        with self.tracker.stage(stage):
            self._send_weights()

    def _send_weights(self) -> None:
        def tracked() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.policy.weights(self._sampler.gather_options):
                self.tracker.assign("engine", [tensor])
                yield name, tensor
                del tensor  # before the next one is gathered

        self._sampler.publish(self._version, tracked())
        self._version += 1

    def _export(self) -> None:
        """Fills the files of an exported model one after another, and writes none."""
        weights, adapters = self.policy.export_weights(), self.policy.adapters
        if adapters is not None and adapters.exported_alone:
            self.tracker.assign("export", [tensor for _, tensor in weights])
            return
        plain, dtype = self.policy.plain_model(), self.export_dtype or self.policy.loaded_dtype
        for _, tensors in fill_files(plain, file_layout(plain, dtype), weights, dtype):
            self.tracker.assign("export", tensors.values())
            del tensors  # before the next file is filled

    def _stage_states(self, states: dict[str, Any]) -> None:
        """Copies what the stager of a checkpoint copies, and serializes a file."""
        _, tensors = split(states)
        with record_function("checkpoint"):
            for local in map(to_local, tensors.values()):
                if (storage := local.untyped_storage()) not in self._staged:
                    self._staged[storage] = torch.empty_like(local)
        with record_function("file"):
            torch.empty(SERIALIZED * largest_file(tensors, self.trainer.world.size), dtype=torch.uint8)

    @contextmanager
    def _optimizer_hooks(self) -> Iterator[None]:
        """Assigns gradients and optimizer states to their terms, by torch's own hooks."""

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.tracker.assign(self._term("gradients"), [p.grad for p in parameters if p.grad is not None])

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            leaves = tree_leaves(list(optimizer.state.values()))
            self.tracker.assign(self._term("optimizer"), [leaf for leaf in leaves if isinstance(leaf, Tensor)])

        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _tensors(batch: TensorDict) -> list[Tensor]:
    return list(batch.exclude("fields").values(include_nested=True, leaves_only=True))


def _stage_name(stage: Stage, name: str) -> str:
    return name if stage.name == "train" else stage.name


def _tokens_here(micro: MicroBatch) -> int:
    """Tokens of this rank's forward."""
    if micro.layout is None or micro.layout.shard is None:
        return micro.computed
    return len(micro.layout.shard.tokens["position_ids"])
