"""The job of `mode=plan`: the models, sources and trainer of the run, on placeholders and the longest possible rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from rft.actor.base import ModelContext, TrainableModel
from rft.actor.forward.logits import vocabulary_size
from rft.actor.init import init_without_loading, read_config
from rft.algorithm.roles import POLICY
from rft.data.datasets import Datasets
from rft.data.encode.lengths import Lengths
from rft.distributed import SINGLE_PROCESS, World, pretend
from rft.errors import Check, checks, part
from rft.logger.log import SilentLog
from rft.modes.plan.dry_run import DryRun
from rft.modes.plan.hooks import PlanHooks
from rft.modes.plan.memory_tracker import MemoryTracker, device_bytes
from rft.modes.plan.skip_compute import SkipCompute
from rft.modes.plan.stubs import StubEncoder, StubEngine, StubSampler, StubTokenizer, stub_scoring
from rft.registry import Target
from rft.reward.models.base import ModelTerm
from rft.rollout.sampler import EngineSampler
from rft.setup.assembly import Changes, Job
from rft.setup.loadable import check_loadable


@dataclass
class Forecast:
    """What a run needs on each rank.

    Attributes:
        memory: bytes of every term at the peak of each stage; terms that end with `HOST` are in host memory.
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
        """The stage that needs the most memory of the device, and its bytes."""
        return max(((stage, device_bytes(terms)) for stage, terms in self.memory.items()), key=lambda item: item[1])


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

    reads_weights = False

    def __init__(self, config: dict[str, Any], launched: int) -> None:
        self._launched = launched
        super().__init__(config)
        plan = self.run.plan
        self._held_out = 0
        self._skip = SkipCompute()
        self._hooks = PlanHooks(self._skip)
        if plan.prompt_tokens is None:
            self._read()
        else:
            self._prompt_tokens = plan.prompt_tokens
            # a new model has the vocabulary size of the tokenizer
            self._vocabulary = 0 if self.actor.options.model_config is None else vocabulary_size(self.tokenizer.build())
        # A sampled step holds everything that a step of given texts does, and more.
        self.source.options = self.source.options.always_sampled()

    @part
    def ranks(self) -> int:
        return self._launched if self.run.plan.ranks is None else self.run.plan.ranks

    @checks
    def _sizes(self) -> Iterator[Check]:
        yield lambda: _check_strategy(self.strategy, self.ranks)
        yield self._check_processor
        yield self._check_rows

    def _check_processor(self) -> Iterator[str]:
        if self.processor is not None:
            yield "mode=plan: the memory of media (actor.processor) is not counted yet; plan a model of text"

    def _check_rows(self) -> Iterator[str]:
        if self.run.plan.prompt_tokens is not None:
            if (epochs := self.run.epochs) is not None:
                yield (
                    f"epochs={epochs:g}: with plan.prompt_tokens no rows are read and counted; set steps=<number> "
                    "epochs=null"
                )
            yield from self.run.batch.check_ranks(self.ranks)
        elif self.run.data.streaming is not None:
            yield "plan.prompt_tokens=null: the rows of a stream are not counted; set it"

    @part
    def planned_config(self) -> PretrainedConfig | None:
        """The config of the policy; None if rows are read, and the model with them."""
        if self.run.plan.prompt_tokens is None:
            return None
        actor = self.actor.options
        # a new model has the vocabulary of the tokenizer
        vocabulary = 0 if actor.model_config is None else vocabulary_size(self.tokenizer.build())
        config = read_config(actor.path, actor.model_config, vocabulary, POLICY, actor.trust_remote_code, media=False)
        check_loadable(config, actor.path, actor.head, POLICY, reads_weights=False)
        return config

    @checks
    def _context_of_model(self) -> Iterator[Check]:
        if (config := self.if_made(lambda: self.planned_config)) is not None:
            yield lambda: self._check_prompt_tokens(config)
            yield lambda: self.engine.options.check_model(config)

    def _check_prompt_tokens(self, model_config: PretrainedConfig) -> Iterator[str]:
        tokens, answer = self.run.plan.prompt_tokens, self.run.rollout.max_new_tokens
        context = model_config.get_text_config().max_position_embeddings
        if tokens is not None and tokens + answer > context:
            yield (
                f"plan.prompt_tokens={tokens}: with rollout.max_new_tokens={answer} that is over the model's context "
                f"of {context}; lower one of them or choose another model"
            )

    def _read(self) -> None:
        """Reads the data to find the longest prompt."""
        loaded = self.load(self.ranks)
        self._vocabulary = vocabulary_size(loaded.tokenizer)
        self._held_out = max((-(-len(rows) // self.ranks) for rows in loaded.held_out.values()), default=0)
        prompt_tokens = self.check.attempt(self._longest, loaded)
        self.check.end()
        self._prompt_tokens = prompt_tokens

    def _longest(self, loaded: Datasets) -> int:
        """Tokens of the longest prompt; for rows without prompts, of the longest row beyond the answer length."""
        if "prompt" in self.needs:
            return int(loaded.lengths.prompts(loaded.train).max())
        if loaded.longest_text is None:
            raise ValueError(
                "plan.prompt_tokens=null: algorithm.source samples, and its rows have no prompts to count; set it"
            )
        return max(1, loaded.longest_text - self.run.rollout.max_new_tokens)

    def model_context(self, world: World, loaded: Datasets) -> ModelContext:
        """The context of the models, with the hooks of the plan."""
        return replace(super().model_context(world, loaded), hooks=self._hooks)

    def start_sampler(self, world: World, policy: TrainableModel, loaded: Datasets, folder: Path) -> EngineSampler:
        """A stub with the run's engine, or with a stub if that engine does not run on tensors of this process."""
        assert isinstance(loaded.encoder, StubEncoder)
        if not self.engine.factory.facts.plain_torch:
            return StubSampler(StubEngine(self.engine.factory.gather_options), loaded.encoder)
        return StubSampler(super().start_sampler(world, policy, loaded, folder).engine, loaded.encoder)

    def _sharded_terms(self, world: World) -> list[ModelTerm]:
        """The terms of the reward whose models are spread over the ranks."""
        self.shard_reward(world)
        scored = self.facts.scores or self.answers
        terms = self.reward.terms.values() if self.reward.shard and scored else ()
        return [term for term in terms if isinstance(term, ModelTerm)]

    def forecast(self) -> Forecast:
        """Takes two steps of every stage of the run.

        Raises:
            ValueError: a component cannot be built; names the key and the cure.
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
            with tracker.stage("load"), skip.creating(), init_without_loading():
                scoring = stub_scoring(self.reward.names)
                trainer, stages = self.assemble(world, loaded, Path(), SilentLog(), changes=Changes(scoring))
                run.batch = batch
            sharded, dtype = self._sharded_terms(world), run.checkpoint.dtype()
            dry_run = DryRun(trainer, encoder, skip, tracker, self._hooks, sharded, dtype)
            dry_run.begin(stages[-1])
            for number, stage in enumerate(stages):
                dry_run.run_stage(number, stage, updates, 0 < run.checkpoint.every < stage.steps)
                if number < len(stages) - 1:
                    dry_run.save(number, stage)
            plain = self.engine.factory.facts.plain_torch
            if plain and self.facts.sampled != "never":
                dry_run.sample("rollout", groups, run.rollout, size)
            if plain and self._held_out and self.grader is None and self.given is None:
                dry_run.sample("evaluate", self._held_out, run.rollout.untruncated(0.0), max(1, run.eval.samples))
            dry_run.save(len(stages) - 1, stages[-1])
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


def _check_strategy(strategy: Target, ranks: int) -> None:
    """Raises a ValueError if the strategy cannot split the work over these ranks."""
    with pretend(ranks) as world:
        strategy.build(world=world)
