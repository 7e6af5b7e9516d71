"""A run gone through without numbers: its real actors, sources and trainer, on the longest rows that can come."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rft.actor.base import TrainableModel
from rft.actor.init import init_without_loading, read_config
from rft.data.base import given_texts
from rft.data.encode.lengths import Lengths
from rft.distributed import SINGLE_PROCESS, World, pretend
from rft.logger.log import SilentLog
from rft.modes.plan.dry_run import DryRun
from rft.modes.plan.memory_tracker import MemoryTracker
from rft.modes.plan.skip_compute import SkipCompute
from rft.modes.plan.stubs import Absent, StubSampler, Texts, Vocabulary, half_right
from rft.rollout.sampler import EngineSampler, Sampler
from rft.rollout.server.teacher import ServedTeacher
from rft.setup.assembly import Job
from rft.setup.components import Components
from rft.setup.datasets import Datasets


@dataclass
class Forecast:
    """What a run takes on each rank.

    Attributes:
        memory: bytes of every term at the fullest moment of each stage.
        parameters, trained: numbers of the policy, over all ranks.
        prompt_tokens, answer_tokens: of the longest row.
        rows: of a step.
        micro_batches: of an optimizer step, where all rows are the longest.
        fullest: tokens of the largest forward that can come.
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
        """The stage that takes the most, and its bytes."""
        return max(((stage, sum(terms.values())) for stage, terms in self.memory.items()), key=lambda item: item[1])


class PlanJob(Job):
    """A job without weights, and without data where `plan.prompt_tokens` is given.

    Args:
        config: the resolved config as plain containers.
        launched: processes of this launch.

    Attributes:
        ranks: processes of the run that is planned.

    Raises:
        Problems: everything that is wrong, also what a run finds when it reads its data.
    """

    def __init__(self, config: dict[str, Any], launched: int) -> None:
        Components.__init__(self, config)
        run, check = self.run, self.check
        self.ranks, self._held_out = launched, 0
        with check():
            if run.plan.ranks is not None:
                self.ranks = run.plan.ranks
            if self.ranks < 1:
                raise ValueError(f"plan.ranks={self.ranks}: set it to 1 or more, or to null")
            with check(), pretend(self.ranks) as world:
                self.strategy.build(world=world)
            if run.plan.prompt_tokens is None:
                if run.data.streaming is not None:
                    raise ValueError("plan.prompt_tokens=null: a stream is not read to find out; set it")
                loaded = self.load(self.ranks)
                self._prompt_tokens = self._longest(loaded)
                self._vocabulary = len(loaded.tokenizer)
                self._held_out = max((-(-len(rows) // self.ranks) for rows in loaded.held_out.values()), default=0)
            else:
                self._suppose(run.plan.prompt_tokens)
        check.end()
        # A sampled step holds everything that a step of given texts does, and more.
        self.source.options = self.source.factory.always_sampled(self.source.options)

    def _longest(self, loaded: Datasets) -> int:
        """Tokens of the longest prompt; of rows without prompts, those that are over the length of an answer."""
        if "prompt" in self.needs:
            return max(loaded.lengths.prompts(loaded.train))
        given = given_texts(self.source.factory, self.source.options)
        if given is None:
            raise ValueError(
                "plan.prompt_tokens=null: algorithm.source samples, and its rows have no prompts to count; set it"
            )
        return max(1, max(self.examples(loaded, given)) - self.run.rollout.max_new_tokens)

    def _suppose(self, prompt_tokens: int) -> None:
        run, check = self.run, self.check
        self._prompt_tokens, self._vocabulary = prompt_tokens, 0
        self.check_ranks(self.ranks)
        with check():
            if prompt_tokens < 1:
                raise ValueError(f"plan.prompt_tokens={prompt_tokens}: set it to 1 or more, or to null")
        with check():
            if run.actor["model_config"] is not None:  # its vocabulary is the tokenizer's
                self._vocabulary = len(self.tokenizer.build())
            shape = read_config(run.actor["path"], run.actor["model_config"], self._vocabulary, "actor")
            context = shape.get_text_config().max_position_embeddings
            if prompt_tokens + run.rollout.max_new_tokens > context:
                raise ValueError(
                    f"plan.prompt_tokens={prompt_tokens}: with rollout.max_new_tokens={run.rollout.max_new_tokens} "
                    f"that is over the model's context of {context}; lower one of them or choose another model"
                )

    def start_sampler(self, world: World, policy: TrainableModel, loaded: Datasets, folder: Path) -> Sampler:
        """A sampler that answers at once, in front of the run's engine if that one runs on tensors without storage."""
        assert isinstance(loaded.encoder, Texts)
        plain = self.engine.factory.facts.plain_torch
        own = super().start_sampler(world, policy, loaded, folder) if plain else EngineSampler(Absent())
        return StubSampler(loaded.encoder, own)

    def forecast(self) -> Forecast:
        """Goes through two steps of every stage of the run.

        Raises:
            ValueError: a part that is built only now refuses; names the key and the cure.
        """
        run, batch = self.run, self.run.batch
        groups, size = batch.prompts // self.ranks, run.algorithm.group_size
        taken = -(-groups // batch.minibatches)  # groups with the rows of one optimizer step
        parts = max(1, taken * batch.minibatches // groups)  # optimizer steps that have so few rows
        run.batch = replace(batch, prompts=taken * self.ranks, balance=False)  # no rank has other rows than this one
        texts = Texts(self._prompt_tokens, run.rollout.max_new_tokens)
        rows = [dict.fromkeys(self.needs, "0")] * max(run.batch.prompts, run.warmup.rows if run.warmup else 0)
        loaded = Datasets(Vocabulary(self._vocabulary), texts, rows, {}, Lengths(SINGLE_PROCESS, texts, None))
        hollow, tracker = SkipCompute(), MemoryTracker(self.strategy.factory.memory_labels)
        with pretend(self.ranks) as world, torch.compiler.set_stance("force_eager"), hollow, tracker.watch():
            with tracker.stage("begin"), hollow.creating(), init_without_loading():
                score = half_right(self.reward.names)
                trainer, stages = self.assemble(world, loaded, Path(), SilentLog(), score)
                run.batch = batch
            for helper in trainer.models.values():
                if isinstance(helper, ServedTeacher):
                    vars(helper)["compute"] = lambda batch, outputs, *_, of=helper: of.blank(batch, outputs)
            walk = DryRun(trainer, texts, hollow, tracker)
            walk.begin(stages[-1])
            for number, stage in enumerate(stages):
                walk.through(number, stage, parts)
            plain = self.engine.factory.facts.plain_torch
            if plain and self.facts.sampled != "never":
                walk.sample("rollout", groups, run.rollout, size)
            if plain and self._held_out and self.grader is None:
                walk.sample("evaluate", self._held_out, run.rollout.untruncated(0.0), max(1, run.eval.samples))
            parameters = list(walk.policy.network.parameters())
            return Forecast(
                memory=walk.memory(),
                parameters=sum(parameter.numel() for parameter in parameters),
                trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
                prompt_tokens=texts.prompt_tokens,
                answer_tokens=run.rollout.max_new_tokens,
                rows=groups * walk.rows // taken,
                micro_batches=walk.micro_batches,
                fullest=walk.fullest,
            )
