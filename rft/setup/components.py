"""The checked parts of a run before anything is loaded, and the methods that several modes use to build them."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rft.actor.base import ColumnModel, ModelContext
from rft.actor.forward.logits import forbidden_tokens, vocabulary_size
from rft.actor.model import add_end_tokens
from rft.algorithm.roles import POLICY
from rft.batch.encoded import MediaFacts
from rft.data.base import GivenTexts
from rft.data.encode.base import MediaProcessor
from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Lengths
from rft.data.encode.limits import check_lengths, fit_prompts, fit_texts
from rft.data.encode.tokenizer import check_tokenizer
from rft.data.encode.truncation import TextLimit
from rft.data.row_checks import check_rows, refuse_agents
from rft.data.rows.lazy import Row, Rows, load
from rft.distributed import SINGLE_PROCESS, World, device_kind
from rft.errors import Check, Checked, checks, part
from rft.evaluation.base import EvaluationContext, Evaluator
from rft.evaluation.generation import GenerationEvaluator, GenerationOptions
from rft.imports import import_part
from rft.redaction import redact
from rft.rollout.answerer import Answerer, SingleTurn, episode_answerer
from rft.rollout.engine.base import Engine, EngineContext
from rft.rollout.engine.texts import stop_tokens
from rft.rollout.sampler import Sampler
from rft.setup.constraints import Constraints
from rft.setup.typed import typed_keys
from rft.setup.unread import check_typed
from rft.strategy.base import DTYPES, Strategy
from rft.train.health import DTYPE


class Components(Constraints):
    """The checked parts of a run. No model and no data are loaded yet.

    Args:
        config: the resolved config as plain containers.
        typed: where the user typed values, by their keys, which must all be read; None: as Hydra knows it.

    Attributes:
        check: collects the mistakes of data and models; `check.end` raises them.

    Raises:
        Problems: all mistakes of the config, each with its yaml key and the cure.
    """

    reads_weights: ClassVar[bool] = True
    policy: "PolicyParts"  # set when the tokenizer is loaded

    def __init__(self, config: dict[str, Any], typed: Mapping[str, str] | None = None) -> None:
        super().__init__(config)
        self.typed = typed_keys() if typed is None else typed
        self.check_all()
        self.check.end()
        self.config = config | {"metric": self.metric}

    @checks
    def _typed(self) -> Iterator[Check]:
        yield lambda: check_typed(self.typed, self)

    def policy_context(
        self, world: World, strategy: Strategy, tokenizer: PreTrainedTokenizerBase, encoder: Encoder
    ) -> ModelContext:
        """What the policy is built with."""
        return ModelContext(
            POLICY, world, strategy, tokenizer, self.run.seed, media=encoder.media_facts, ends=encoder.ends
        )

    def join(self) -> World:
        """Joins the process group."""
        world: World = self.strategy.options.join()
        return world

    def watchdog(self, world: World) -> AbstractContextManager[Any]:
        """What ends this rank if another one of torchrun fails, dies or hangs; see `rft.remote.watchdog`."""
        if "RANK" not in os.environ or world.size == 1:
            return nullcontext()
        made = import_part("rft.remote.watchdog", "Watchdog", f"torchrun with {world.size} ranks")
        limits = self.run.faults.dead_after_s, self.run.faults.collective_timeout_s
        watchdog: AbstractContextManager[Any] = made(world, *limits, redact)
        return watchdog

    def place_reward(self, world: World) -> None:
        """Sets where the models of the reward compute. A collective with `reward.shard`.

        Raises:
            ValueError: they cannot compute there; names the key.
        """
        self.reward.place(world.device)
        self.shard_reward(world)

    def shard_reward(self, world: World) -> None:
        """Spreads the models of the reward over the processes with `reward.shard`. Raises as `place_reward`."""

        def strategy(dtype: str, offload: bool) -> Strategy:
            options = self.strategy.options.scoring_options(dtype, offload)
            made: Strategy = self.strategy.factory(options=options, world=world)
            return made

        self.reward.shard_models(world, strategy)

    def check_dependencies(self) -> None:
        """Raises a ValueError if a run of `depends_on` is missing; later checks would only report its consequences."""
        for name, before in self.run.depends_on.items():
            before.check(f"depends_on.{name}")

    def counting_world(self, world: World) -> World:
        """The processes that count tokens together: all, or each alone if one has found a mistake. A collective."""
        return SINGLE_PROCESS if any(world.gather(bool(self.check.messages))) else world

    def load_held_out(self) -> dict[str, Rows]:
        """The held-out sets by name; mistakes in them are added to `check`."""
        if self.given is not None:
            fields = self.facts.fields
        else:
            fields = ("prompt", *self.reward.fields) if self.grader is None else self.grader.fields
        loaded = {name: self.check.attempt(load, target, fields) for name, target in self.held_out.items()}
        self.check.run(self.reward.check)
        sets = {name: rows for name, rows in loaded.items() if rows is not None}
        for rows in sets.values() if self.answers else ():
            self.check.attempt(self.check_sampled, rows, True)
        return sets

    def fit_held_out(
        self,
        sets: dict[str, Rows],
        lengths: Lengths,
        context: int,
        texts: tuple[TextLimit, GivenTexts] | None,
        log: Callable[[str], None],
    ) -> None:
        """Applies `data.truncation` and `data.overlong` to held-out sets; adds a message to `check` for long rows.

        Args:
            lengths: counts the tokens of rows.
            context: most tokens of a text that the policy reads.
            texts: the limit of given texts, and what makes them; None if the policy answers the prompts.
            log: shows a message to the user.
        """
        limit = self.run.data.prompt_limit

        def fit(name: str) -> None:
            key, rows = f"data.eval.{name}", sets[name]
            if texts is None or limit is not None:
                rows, counts = fit_prompts(key, rows, lengths, limit, log)
            if texts is not None:
                rows, _ = fit_texts(key, rows, lengths, *texts, log)
            elif self.grader is None:  # else the policy scores texts and answers none
                check_lengths(key, counts, context, self.run.rollout.max_new_tokens)
            sets[name] = rows

        for name in list(sets):
            self.check.attempt(fit, name)

    def check_sampled(self, rows: Rows, scored: bool) -> None:
        """Checks rows whose answers are sampled, and with `scored` have a reward.

        Raises:
            ValueError: a row asks for tools, and the run has no environment; or the reward cannot score it.
        """

        def check(row: Row) -> None:
            if self.environments is None:
                refuse_agents(row)
            if scored:
                self.reward.check_row(row)

        check_rows(rows, check)

    def count_steps(self, rows: int) -> str:
        """Sets the number of steps that the epochs take, and checks what depends on it.

        Args:
            rows: number of training rows.

        Returns:
            A message for the user.
        """
        run = self.run
        assert run.epochs is not None
        run.steps = math.ceil(rows * run.epochs / run.batch.prompts)
        for check in self.step_checks():
            self.check.run(check)
        return f"epochs={run.epochs:g} of {rows:,} rows with batch.prompts={run.batch.prompts} are {run.steps:,} steps"

    @property
    def held_out_given(self) -> GivenTexts | None:
        """What makes the held-out texts; None if the policy answers held-out prompts."""
        return self.given if self.grader is None else self.grader.given(self.source.options)

    def make_processor(self, tokenizer: PreTrainedTokenizerBase) -> MediaProcessor | None:
        """The processor of the policy; None for a model of text."""
        if self.processor is None:
            return None
        made: MediaProcessor = self.processor.build(tokenizer=tokenizer)
        facts = self.engine.factory.facts
        made.keeps_raw, made.sends_padded = facts.has_processor, facts.masks_padding
        return made

    def make_engine(
        self,
        world: World,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        media: MediaFacts | None,
    ) -> Engine:
        """The engine of `rollout`, without weights; see `EngineContext`. The model is its own."""
        add_end_tokens(model, stop_tokens(tokenizer, self.run.rollout.stop))
        trainer = self.strategy.options.compute_dtype()
        context = EngineContext(
            world=world,
            model=model,
            tokenizer=tokenizer,
            folder=folder,
            engine_args=self.run.rollout.engine_args,
            lora=self.actor.options.lora,
            dtype=DTYPES[trainer],
            media=media,
            device_type=device_kind(self.strategy.options.device_name()),
            while_updating=self.run.rollout.updating,
        )
        return self.engine.build(context=context)

    def make_encoder(self, tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None) -> Encoder:
        """The encoder of rows and dialogues.

        Raises:
            ValueError: names the key and the cure.
        """
        encoder = self.run.data.encoder(tokenizer, processor, scored=self.actor.options.head == "score")
        if self.environments is not None:
            self.environments.check(encoder)
        return encoder

    def answerer(self, encoder: Encoder, sampler: Sampler) -> Answerer:
        """Answers rows with the sampler: by a completion each, or by episodes."""
        if self.environments is None:
            terms = self.reward.terms.values()
            return SingleTurn(encoder, sampler, [term.tool_calls for term in terms if term.tool_calls is not None])
        return episode_answerer(self.environments, encoder, sampler, self.policy.context)

    def check_engine_model(
        self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None
    ) -> None:
        """Checks that the engine can run the model with this config, and forbid what cannot follow."""
        self.engine.options.check_model(config)
        engine, media = self.engine.factory, None if processor is None else processor.facts
        most, size = engine.facts.most_forbidden, config.get_text_config().vocab_size
        forbidden = forbidden_tokens(size, tokenizer, media)
        if most is not None and len(forbidden) > most:
            raise ValueError(
                f"actor.path: {len(forbidden):,} ids of the model have no token or stand for media, and "
                f"{engine.__name__} forbids at most {most:,}; set rollout=hf, or give the model "
                f"{vocabulary_size(tokenizer):,} rows with resize_token_embeddings of transformers and save it"
            )

    def engine_dtype(self) -> str:
        """The name of the dtype in which the engine computes."""
        trainer = self.strategy.options.compute_dtype()
        return str(self.engine.options.compute_dtype(self.run.rollout.engine_args, trainer))

    def exact(self) -> bool:
        """True if trainer and engine should report the same log-probabilities of sampled tokens, up to rounding."""
        run = self.run
        trainer = self.strategy.options.compute_dtype()
        fresh = run.algorithm.old_logprobs == "actor" or run.batch.minibatches * run.batch.epochs == 1
        same = run.algorithm.sampler == POLICY and not run.rollout.truncates()
        return fresh and same and (trainer, self.engine_dtype()) == (DTYPE, DTYPE)

    def without_state(self) -> dict[str, Any]:
        """The plugins that may remember nothing between steps, by what messages call them."""
        functions = self.algorithm.functions()
        if self.warmup_algorithm is not None:
            functions |= self.warmup_algorithm.functions()
        schedules = {f"the schedule {type(schedule).__name__}": schedule for schedule in self.schedules.values()}
        return functions | schedules | {f"reward.terms.{name}": term for name, term in self.reward.terms.items()}

    def evaluator(
        self,
        world: World,
        models: Mapping[str, ColumnModel],
        sampler: Sampler | None,
        encoder: Encoder,
        sets: dict[str, Rows],
    ) -> Evaluator:
        """The evaluator of held-out sets: of their loss, or that of the policy's score head, or of answers.

        Args:
            models: by their keys; none if the policy only generates text.
            sampler: None if nothing is generated.
        """
        run, context = self.run, EvaluationContext(world, encoder, sets)
        if self.given is not None:
            build = import_part("rft.evaluation.loss", "LossEvaluator", "eval.loss=true")
            evaluator: Evaluator = build(context, self.algorithm, self.given, models, run.seed)
            return evaluator
        if self.grader is not None:
            policy, source = models[POLICY], self.source.options
            return self.grader(context, lambda batch: policy.compute(batch, ("score",), 1.0)["score"], source)
        assert sampler is not None
        drawn = GenerationOptions(
            greedy=run.rollout.untruncated(0.0),
            sampling=run.eval.sampling(run.rollout),
            samples=run.eval.samples,
            pass_k=run.eval.ks(),
            maj_k=run.eval.maj_k,
            seed=run.seed,
        )
        return GenerationEvaluator(context, self.answerer(encoder, sampler), self.reward, drawn)


class PolicyParts(Checked):
    """What turns the texts of the policy into tokens, and its config; no weights are read.

    Args:
        job: the checked config; its `check` collects the mistakes.

    Attributes:
        model_config: the transformers config of the policy.
    """

    model_config: part[PretrainedConfig]

    def __init__(self, job: Components) -> None:
        super().__init__(job.check)
        self.job = job

    @property
    def context(self) -> int:
        """Most tokens of a text that the policy reads."""
        most: int = self.model_config.get_text_config().max_position_embeddings
        return most

    @part
    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer: PreTrainedTokenizerBase = self.job.tokenizer.build()
        return tokenizer

    @part
    def processor(self) -> MediaProcessor | None:
        return self.job.make_processor(self.tokenizer)

    @part
    def encoder(self) -> Encoder:
        return self.job.make_encoder(self.tokenizer, self.processor)

    def check_config(self) -> Iterator[Check]:
        """The checks of the config against the tokenizer and the engine."""
        yield lambda: check_tokenizer(self.tokenizer, self.model_config)
        yield lambda: self.job.check_engine_model(self.model_config, self.tokenizer, self.processor)
