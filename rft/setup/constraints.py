"""The checks of the parts of a config against each other, which need neither data nor a model.

Each names the yaml key and the cure.
"""

from collections.abc import Iterator

from rft.actor.init import SCORING
from rft.actor.options import check_adapters
from rft.algorithm.check import check_critic_warmup, check_flow, check_reference, check_roles, corrects_for_age
from rft.algorithm.roles import POLICY, REFERENCE, ROLES
from rft.data.rows.base import check_mixtures, check_stream
from rft.errors import Check, build_each, checks, prefixed
from rft.rollout.answerer import REWARD
from rft.rollout.engine.base import EngineCheckContext
from rft.rollout.source.rollout import draws_in_order
from rft.setup.parts import Parts
from rft.train.schedules import Schedule


class Constraints(Parts):
    """The parts of a run, which fit each other. Mistakes are reported in the order of the checks below."""

    @checks
    def _run(self) -> Iterator[Check]:
        run = self.run
        yield run.check_name
        yield run.check_folders
        yield run.check_time
        yield run.check_length
        yield lambda: run.batch.check(run.algorithm.group_size)
        if self.if_made(lambda: run.steps) is not None:
            yield from self.step_checks()

    def step_checks(self) -> Iterator[Check]:
        """The checks that need the number of steps. With `epochs` it is known when the rows are counted."""
        yield self.run.check_profile
        yield self._check_schedules

    def _check_schedules(self) -> None:
        """Checks the schedules after `algorithm.critic_warmup`, which sets one of them."""
        steps = self.run.step_count()
        check_critic_warmup(self.run.algorithm, steps)
        schedules, algorithm = self.schedules, self.algorithm
        reads = algorithm.reads()
        models = [role.key for role in ROLES if role.writes(reads)]

        def check(name: str, schedule: Schedule) -> None:
            schedule.check(f"algorithm.schedules.{name}", steps, models, algorithm.learners)

        build_each(check, schedules)

    @checks
    def _evaluation(self) -> Iterator[Check]:
        yield lambda: self.run.eval.check()
        yield lambda: self.run.eval.check_vote(self.reward)
        yield lambda: check_mixtures(self.held_out)
        yield lambda: self.run.check_stop(self.metric)

    @checks
    def _models(self) -> Iterator[Check]:
        yield lambda: check_adapters(self.models)
        yield self._check_head
        yield lambda: self.strategy.options.check(self.model_facts)

    def _check_head(self) -> Iterator[str]:
        """Checks that the policy has the head that its losses train, and that the engine samples only from a language
        head.
        """
        actor, engine, facts, answers = self.actor.options, self.engine.factory.facts, self.facts, self.answers
        for key, algorithm in self.algorithms.items():
            if (loss := algorithm.policy.terms[0].plugin).facts.head != actor.head:
                yield (
                    f"{key}.loss: {loss.name!r} trains the head {loss.facts.head!r}, but actor.head={actor.head}; "
                    "choose another loss, or another actor/head"
                )
        scores = actor.head in SCORING
        if engine.samples and scores:
            yield f"actor.head={actor.head}: a model with this head cannot generate text; choose rollout=none"
        if not engine.samples and not scores and facts.sampled != "never":
            yield "rollout=none: no engine samples the texts that train; choose rollout=hf"
        elif not engine.samples and answers:
            yield (
                "rollout=none: no engine samples answers to the prompts of data.eval; choose rollout=hf, or "
                "eval.loss=true for the loss of held-out texts"
            )
        if scores and actor.lora is not None:
            yield f"actor.lora: adapters do not train the head of actor.head={actor.head}; set actor.lora=null"

    @checks
    def _engine(self) -> Iterator[Check]:
        yield self._check_engine
        yield self._check_staleness
        yield self._check_eval_sampling
        yield self._check_media

    def _check_engine(self) -> None:
        """Checks the options of the engine, how it samples, and that it takes `rollout.engine_args`."""
        rollout, engine, device = self.run.rollout, self.engine, self.strategy.options.device_name()
        media, lora = self.processor is not None, self.actor.options.lora
        if rollout.engine_args and not engine.factory.facts.takes_arguments:
            name = sorted(rollout.engine_args)[0]
            raise ValueError(
                f"rollout.engine_args.{name}: {engine.factory.__name__} takes no arguments of an engine; choose "
                "another rollout or take it out"
            )
        engine.options.check(EngineCheckContext(rollout.engine_args, lora, media, device, rollout, rollout.updating))
        with prefixed("rollout."):
            engine.factory.check_sampling(rollout, logprobs=True)

    def _check_staleness(self) -> Iterator[str]:
        """Checks that the run can sample ahead of its steps, and that its algorithm corrects for it."""
        staleness, sampler = self.run.rollout.staleness, self.run.algorithm.sampler
        if not staleness:
            return
        key, synchronous = f"rollout.staleness={staleness}", "set rollout.staleness=0"
        engine, source = self.engine.factory, self.source.factory
        if not engine.facts.concurrent:
            yield (
                f"{key}: {engine.__name__} does not sample while the run trains; choose an engine that does, see "
                f"docs/async.md, or {synchronous}"
            )
        if self.environments is not None:
            yield f"{key}: episodes of environments do not outlive a step; {synchronous}"
        if not draws_in_order(source):
            yield (
                f"{key}: {source.__name__} draws its prompts step by step; choose algorithm/source=rollout, or "
                f"{synchronous}"
            )
        if sampler != POLICY:
            yield f"{key}: algorithm.sampler={sampler} samples, whose weights stay for many steps; {synchronous}"
        if self.run.data.streaming is not None:
            yield f"{key}: a resumed run could not read streamed rows again; set data.streaming=null, or {synchronous}"
        if self.reward.shard:
            yield f"{key}: with reward.shard=true all ranks compute scores together; set it to false, or {synchronous}"
        if not corrects_for_age(self.algorithm):
            yield (
                f"{key}: algorithm.old_logprobs={self.run.algorithm.old_logprobs} and no correction, so nothing "
                "corrects for older weights; set algorithm.old_logprobs=rollout, or choose an algorithm/correction"
            )

    def _check_eval_sampling(self) -> None:
        """Checks that the engine can draw the sampled answers of an evaluation."""
        rollout, evaluation, engine = self.run.rollout, self.run.eval, self.engine.factory
        if evaluation.samples:
            with prefixed("eval."):
                engine.check_sampling(evaluation.sampling(rollout), logprobs=False)

    def _check_media(self) -> None:
        """Checks that the engine samples from prompts with media, if it samples and the policy takes media."""
        engine, facts, answers = self.engine.factory, self.facts, self.answers
        samples = facts.sampled != "never" or answers
        if self.processor is not None and samples and not engine.facts.takes_media:
            raise ValueError(
                f"actor.processor: {engine.__name__} samples from prompts of text alone; set rollout=hf, or "
                "actor/processor=none"
            )

    @checks
    def _batches(self) -> Iterator[Check]:
        yield lambda: self.source.options.check(self.check_context)
        yield lambda: check_stream(self.run.data.streaming, self.train)
        yield lambda: check_flow(self.algorithm, self.facts.writes, self.facts.writes_if_read)
        yield lambda: check_roles(self.algorithm, self.helpers)
        yield lambda: check_reference(
            self.algorithm, self.facts.sampled != "never", self.precompute, self.starts_as_policy(REFERENCE)
        )
        yield self._check_warmup_source
        yield self._check_warmup_flow

    def _check_warmup_source(self) -> None:
        source, warmup = self.warmup_source, self.run.warmup
        if source is not None and warmup is not None:
            algorithm = self.if_made(lambda: self.warmup_algorithm)
            source.options.check(self.context_of(source.key, warmup.rows, 1, algorithm))

    def _check_warmup_flow(self) -> None:
        algorithm, facts = self.warmup_algorithm, self.warmup_facts
        if algorithm is not None and facts is not None:
            check_flow(algorithm, facts.writes, facts.writes_if_read)

    @checks
    def _environments(self) -> Iterator[Check]:
        yield self._check_environments

    def _check_environments(self) -> Iterator[str]:
        """Checks that the run can answer with episodes, and that a reward of the environment has an environment."""
        environments, facts, reward, algorithm = self.environments, self.facts, self.reward, self.algorithm
        media, rewards = self.processor is not None, REWARD in reward.names
        if environments is None:
            if rewards:
                yield (
                    f"reward.terms.{REWARD}: the run has no environment whose reward it could be; choose an environment"
                )
            return
        canary = reward.canary.path is not None
        yield from environments.check_run(algorithm, facts, self.run.mode, rewards, media, canary)

    @checks
    def _packages(self) -> Iterator[Check]:
        for sink in self.if_made(lambda: self.sinks) or ():
            yield sink.check
