"""The job of `mode=plan`: the models, sources and trainer of the run, on placeholders and the longest possible rows."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rft.actor.base import ModelContext, TrainableModel
from rft.actor.init import init_without_loading, read_config
from rft.data.base import given_texts
from rft.data.encode.lengths import Lengths
from rft.distributed import SINGLE_PROCESS, World, pretend
from rft.logger.log import SilentLog
from rft.modes.plan.dry_run import DryRun
from rft.modes.plan.hooks import PlanHooks
from rft.modes.plan.memory_tracker import MemoryTracker
from rft.modes.plan.skip_compute import SkipCompute
from rft.modes.plan.stubs import StubEncoder, StubEngine, StubSampler, StubTokenizer, stub_score
from rft.rollout.sampler import EngineSampler, Sampler
from rft.setup.assembly import Job
from rft.setup.datasets import Datasets


@dataclass
class Forecast:
    """What a run needs on each rank.

    Attributes:
        memory: bytes of every term at the peak of each stage.
        parameters, trained: parameters of the policy, over all ranks, and those that train.
        prompt_tokens, answer_tokens: of the longest row.
        rows: of a step.
        micro_batches: of an optimizer step in which all rows have the maximal length.
        fullest: tokens of the largest possible forward.
    """

    memory: dict[str, dict[str, int]]
    parameters: int
    trained: int
    prompt_tokens: int
    answer_tokens: int
    rows: int
    micro_batches: int
    fullest: int

    def peak(self) -> tuple[str, int]:
        """The stage that needs the most memory, and its bytes."""
        return max(((stage, sum(terms.values())) for stage, terms in self.memory.items()), key=lambda item: item[1])


class PlanJob(Job):
    """A job without weights, and without data if `plan.prompt_tokens` is given.

    Args:
        config: the resolved config as plain containers.
        launched: number of processes of this launch.

    Attributes:
        ranks: number of processes of the planned run.

    Raises:
        Problems: all errors of the config, including those that a run finds when it reads its data.
    """

    def __init__(self, config: dict[str, Any], launched: int) -> None:
        super().__init__(config)
        plan = self.run.plan
        self.ranks, self._held_out = launched if plan.ranks is None else plan.ranks, 0
        self._skip = SkipCompute()
        self._hooks = PlanHooks(self._skip)
        if self.ranks < 1:
            self.check.messages.append(f"plan.ranks={self.ranks}: set it to 1 or more, or to null")
            self.check.end()
        self.check.attempt(self._try_strategy)
        if plan.prompt_tokens is None:
            self._read()
        else:
            self._set_prompt_tokens(plan.prompt_tokens)
        self.check.end()
        # A sampled step holds everything that a step of given texts does, and more.
        self.source.options = self.source.factory.always_sampled(self.source.options)

    def _try_strategy(self) -> None:
        with pretend(self.ranks) as world:
            self.strategy.build(world=world)

    def _read(self) -> None:
        """Reads the data to find the longest prompt."""
        if self.run.data.streaming is not None:
            self.check.messages.append("plan.prompt_tokens=null: a stream is not read to find out; set it")
            return
        loaded = self.load(self.ranks)
        self._vocabulary = len(loaded.tokenizer)
        self._held_out = max((-(-len(rows) // self.ranks) for rows in loaded.held_out.values()), default=0)
        self.check.make("prompt_tokens", partial(self._longest, loaded))
        self._prompt_tokens = self.check.parts["prompt_tokens"] if self.check.has("prompt_tokens") else 0

    def _longest(self, loaded: Datasets) -> int:
        """Tokens of the longest prompt; for rows without prompts, of the longest row beyond the answer length."""
        if "prompt" in self.needs:
            return max(loaded.lengths.prompts(loaded.train))
        given = given_texts(self.source.factory, self.source.options)
        if given is None:
            raise ValueError(
                "plan.prompt_tokens=null: algorithm.source samples, and its rows have no prompts to count; set it"
            )
        return max(1, max(self.examples(loaded, given)) - self.run.rollout.max_new_tokens)

    def _set_prompt_tokens(self, prompt_tokens: int) -> None:
        run, check = self.run, self.check
        self._prompt_tokens, self._vocabulary = prompt_tokens, 0
        self.check_ranks(self.ranks)
        if prompt_tokens < 1:
            check.messages.append(f"plan.prompt_tokens={prompt_tokens}: set it to 1 or more, or to null")
        if run.actor["model_config"] is not None:  # its vocabulary is the tokenizer's
            check.make("words", self.tokenizer.build)
            if not check.has("words"):
                return
            self._vocabulary = len(check.parts["words"])
        shape = check.attempt(read_config, run.actor["path"], run.actor["model_config"], self._vocabulary, "actor")
        if shape is None:
            return
        context = shape.get_text_config().max_position_embeddings
        if prompt_tokens + run.rollout.max_new_tokens > context:
            check.messages.append(
                f"plan.prompt_tokens={prompt_tokens}: with rollout.max_new_tokens={run.rollout.max_new_tokens} that is "
                f"over the model's context of {context}; lower one of them or choose another model"
            )

    def model_context(self, world: World, loaded: Datasets) -> ModelContext:
        """The context of the models, with the hooks of the plan."""
        return replace(super().model_context(world, loaded), hooks=self._hooks)

    def start_sampler(self, world: World, policy: TrainableModel, loaded: Datasets, folder: Path) -> Sampler:
        """A stub in front of the run's engine, or of a stub if that engine does not run on tensors of this process."""
        assert isinstance(loaded.encoder, StubEncoder)
        plain = self.engine.factory.facts.plain_torch
        own = super().start_sampler(world, policy, loaded, folder) if plain else EngineSampler(StubEngine())
        return StubSampler(loaded.encoder, own)

    def forecast(self) -> Forecast:
        """Takes two steps of every stage of the run.

        Raises:
            ValueError: a component that is built only now is wrong; names the key and the cure.
        """
        run, batch = self.run, self.run.batch
        groups, size = batch.prompts // self.ranks, run.algorithm.group_size
        taken = -(-groups // batch.minibatches)  # groups of one optimizer step
        updates = max(1, taken * batch.minibatches // groups)  # optimizer steps with so few rows
        run.batch = replace(batch, prompts=taken * self.ranks, balance=False)  # all ranks have equal rows
        encoder = StubEncoder(self._prompt_tokens, run.rollout.max_new_tokens)
        rows = [dict.fromkeys(self.needs, "0")] * max(run.batch.prompts, run.warmup.rows if run.warmup else 0)
        loaded = Datasets(StubTokenizer(self._vocabulary), encoder, rows, {}, Lengths(SINGLE_PROCESS, encoder, None))
        skip, tracker = self._skip, MemoryTracker(self.strategy.factory.memory_labels)
        with pretend(self.ranks) as world, torch.compiler.set_stance("force_eager"), skip, tracker.watch():
            with tracker.stage("begin"), skip.creating(), init_without_loading():
                score = stub_score(self.reward.names)
                trainer, stages = self.assemble(world, loaded, Path(), SilentLog(), score)
                run.batch = batch
            dry_run = DryRun(trainer, encoder, skip, tracker, self._hooks)
            dry_run.begin(stages[-1])
            for number, stage in enumerate(stages):
                dry_run.run_stage(number, stage, updates)
            plain = self.engine.factory.facts.plain_torch
            if plain and self.facts.sampled != "never":
                dry_run.sample("rollout", groups, run.rollout, size)
            if plain and self._held_out and self.grader is None:
                dry_run.sample("evaluate", self._held_out, run.rollout.untruncated(0.0), max(1, run.eval.samples))
            parameters = list(dry_run.policy.network.parameters())
            return Forecast(
                memory=dry_run.memory(),
                parameters=sum(parameter.numel() for parameter in parameters),
                trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
                prompt_tokens=encoder.prompt_tokens,
                answer_tokens=run.rollout.max_new_tokens,
                rows=groups * dry_run.rows // taken,
                micro_batches=dry_run.micro_batches,
                fullest=dry_run.fullest,
            )
