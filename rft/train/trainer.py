"""The one loop: next batch, columns, update, publish, finish. It knows no algorithm, no engine and no modality."""

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from rft.actor.base import TRAINING_STATE, ColumnModel, trainable
from rft.actor.loading.export import add_to_config
from rft.algorithm.divergence import WORST
from rft.algorithm.roles import POLICY
from rft.algorithm.step import MiniBatch, PreparedRows, StepContext, current_columns, prepare_batch, select_rows
from rft.batch.collate import mini_batches
from rft.batch.columns import lengths
from rft.batch.scores import count_unscored, is_scored
from rft.data.fingerprint import warn_of_changed_rows
from rft.errors import at_step
from rft.evaluation.base import measured, updated
from rft.imports import import_part
from rft.logger.history import CANARY
from rft.metrics import Metrics, add_tflops, peak_gib
from rft.rollout.engine.texts import describe_tokens
from rft.stateful import Stateful, load_states, states
from rft.train.checkpoint.saved_state import SavedState
from rft.train.diverged import nonfinite_weight
from rft.train.health import GAP, gap_warning, unscored_problem
from rft.train.ledger import Ledger
from rft.train.observation import sampled_texts
from rft.train.records import Output, Trained, Watch
from rft.train.stage import Phase, Stage, steps_in_all


@dataclass(eq=False)
class Trainer:
    """Runs stages one after another on the same models.

    Args:
        trained: the models, and what they share.
        output: what the run writes.
        watch: what is looked at while it trains, and what stops it.
    """

    trained: Trained
    output: Output
    watch: Watch

    def __post_init__(self) -> None:
        self.models, self.sampler = self.trained.models, self.trained.sampler
        self.log, self.checkpoints = self.output.log, self.output.checkpoints
        self.policy = trainable(self.models[POLICY])
        self.world = self.policy.world
        self.ledger = Ledger(self.world)
        self.stage = ""  # name of the stage that has begun last
        self.phase = Phase.ROLLOUT  # the one that has begun last
        self.step = 0  # steps done
        self.evaluated = -1  # the step after which the last evaluation ran
        self.numbers: dict[str, float] = {}
        self.warns_of_gap = self.watch.exact

    @property
    def parts(self) -> dict[str, Stateful]:
        """What remembers earlier steps of the run, by its key in a checkpoint."""
        return {"ledger": self.ledger, "faults": self.watch.nonfinite}

    def fit(self, stages: list[Stage]) -> dict[str, float]:
        """Trains, going on from the last checkpoint where there is one. Returns the last value of every number."""
        for stage in stages:  # before the sampler takes memory
            self.precompute(stage, None)
        saved = self.checkpoints.read()
        if saved is None:
            self.check_weights()
            self.log.rewind(-1)
            if self.watch.evaluates_at_start and self.watch.evaluator is not None:
                texts: list[dict[str, Any]] = []
                self.record(stages[0].name, self.evaluate(texts), texts)
        else:
            with saved.reading():
                self.step, self.numbers = saved["step"], saved["numbers"]
                load_states(self.parts, saved)
            self.log.rewind(self.step)
            steps, origin = steps_in_all(stages, saved), saved.origin(self.world.size)
            self.log.message(f"continues from step {self.step} of {steps} in {origin}")
            warn_of_changed_rows(saved.get("rows", {}), self.output.rows, self.log.warning)
        for number, stage in enumerate(stages):
            if saved is not None and stage.ended(number, saved):
                continue
            done = self.begin(number, stage, saved)
            self.precompute(stage, done)
            saved = None
            with self.log.stage(stage.name, self.step - done, stage.steps, done):
                for stage_step in range(done + 1, stage.steps + 1):
                    if stage.source.samples():
                        self.publish(stage, stage_step - 1)
                    self.step += 1
                    with self.output.profiler.step(self.step), at_step(self.step):
                        metrics, started = Metrics(), time.perf_counter()
                        self.phase = Phase.ROLLOUT
                        batch = stage.source.next(metrics)
                        self.sampler.release()
                        step = self.compute_columns(stage, batch, metrics)
                        self.update(stage, stage_step, batch, step)
                        self.check_weights()
                        stage.after_step(stage_step, self.models)
                        if stage.source.samples():
                            with metrics.timer("refresh"):
                                self.publish(stage, stage_step)
                            for name, value in self.sampler.health().items():
                                metrics.largest(f"engine/{name}", value)
                        self.describe(batch, metrics, time.perf_counter() - started)
                    if self.finish(number, stage, stage_step, batch, metrics, stage is stages[-1]):
                        break
            stage.source.close()
        return self.numbers

    def begin(self, number: int, stage: Stage, saved: SavedState | None) -> int:
        """Prepares the actors for a stage and returns how many of its steps are done already."""
        self.stage, self.phase = stage.name, Phase.BEGIN
        within = saved is not None and saved["stage"] == number
        if saved is not None and not within:
            self.load_models(saved, TRAINING_STATE)
        for key, model in self.models.items():
            optimizer = stage.optimizer if model is self.policy else model.optimizer_options
            if optimizer is not None:
                trainable(model).begin_training(optimizer, stage.updates(key))
        if saved is not None and within:
            self.load_models(saved)
            with saved.reading():
                load_states(stage.parts, saved)
            return int(saved["stage_step"])
        for actor in self.trained.copies:
            actor.copy_weights_from(self.policy)
        return 0

    def load_models(self, saved: SavedState, left_out: tuple[str, ...] = ()) -> None:
        """Loads the models of a checkpoint, without some keys of their states; it has each one that trains."""
        trained = [key for key, model in self.models.items() if model.optimizer_options is not None]
        for key in dict.fromkeys([*trained, *saved.keys_of("actors")]):
            with self.world.wait.during(f"the loading of {key}"), saved.reading():
                template = self.models[key].state_to_fill()
                self.models[key].load_state_dict(saved.fill("actors", key, template, left_out))

    def precompute(self, stage: Stage, done: int | None) -> None:
        """Computes the columns of models that are frozen and precomputed; see `precompute_columns`."""
        self.phase = Phase.COLUMNS
        for model in (model for model in self.models.values() if model.precomputed):
            precompute_columns = import_part("rft.train.precompute", "precompute_columns", f"{model.key}.precompute")
            held_out = self.watch.evaluator.batches() if self.watch.evaluator is not None else ()
            precompute_columns(model, stage, done, held_out, self.step_context, self.log.message)

    def compute_columns(self, stage: Stage, batch: TensorDict, metrics: Metrics) -> StepContext:
        """Adds the columns that the algorithm needs before the update; see `rft.algorithm.step`."""
        self.phase, step = Phase.COLUMNS, self.step_context(stage, batch, metrics)
        with metrics.timer("annotate"):
            prepare_batch(stage.algorithm, batch, step)
        return step

    def step_context(self, stage: Stage, batch: TensorDict, metrics: Metrics) -> StepContext:
        """What the step of a stage on these rows computes with."""
        updates, seed = stage.minibatches * stage.epochs, self.policy.context.seed + self.step
        balance, temperature = self.trained.balance, stage.source.temperature
        return StepContext(self.models, balance, self.world, batch, temperature, metrics, updates, seed)

    def update(self, stage: Stage, stage_step: int, batch: TensorDict, step: StepContext) -> None:
        """Trains on every mini-batch of every epoch. Mini-batches are cut from one permutation over all ranks."""
        self.phase, metrics, flops = Phase.UPDATE, step.metrics, list[float | None]()
        chosen_rows = select_rows(stage.algorithm, batch, step)
        units = torch.tensor([unit for rank_units in self.world.gather(batch["unit"].tolist()) for unit in rank_units])
        started = time.perf_counter()
        with metrics.timer("update"):
            for epoch in range(stage.epochs):
                seed = self.policy.context.seed + self.step * stage.epochs + epoch
                for number, chosen in enumerate(mini_batches(units, stage.minibatches, seed)):
                    rows = chosen_rows[torch.isin(chosen_rows["unit"], chosen)]
                    current = current_columns(stage.algorithm, rows, epoch > 0 or number > 0, step)
                    part = MiniBatch(stage.algorithm, batch, rows, current, seed * stage.minibatches + number)
                    prepared = part.prepare(step)
                    for key in prepared.updates:
                        if stage.trains(key, stage_step):
                            self.minimise(self.models[key], part, prepared, step)
                            flops.append(trainable(self.models[key]).flops(prepared.rows))
        self.watch.nonfinite.record(metrics)
        add_tflops(metrics, flops, time.perf_counter() - started, self.policy.context.strategy.peak_tflops())

    def minimise(self, model: ColumnModel, part: MiniBatch, prepared: PreparedRows, step: StepContext) -> None:
        """One optimizer step of one model; one that is not finite stops the run, is skipped, or loses rows."""

        def update(dropped: list[int]) -> None:
            rows, dummy, updates = prepared
            if dropped:  # the numbers of `prepare` are in the metrics already
                rows, dummy, updates = part.without(dropped).prepare(replace(step, metrics=Metrics()))
                model.context.hooks.on_retry(model)
            trainable(model).update(rows, dummy, updates[model.key], step.temperature, step.metrics)

        self.watch.nonfinite.take(self.step, model.key, step.metrics, update)

    def check_weights(self) -> None:
        """Raises a ValueError if a model that trains has a weight that is not finite: nothing saves or samples it."""
        for key, model in self.models.items():
            if model.optimizer_options is not None and (name := trainable(model).nonfinite_tensor()) is not None:
                raise nonfinite_weight(self.step, key, name, self.checkpoints.latest())

    def publish(self, stage: Stage, done: int) -> None:
        """Publishes the weights that a stage samples with; the version of the policy is the number of the step."""
        self.phase, key = Phase.PUBLISH, stage.sampler
        version = self.step if key == POLICY else self.step - stage.weights_age(key, done)
        self.sampler.publish(version, self.models[key].weights(self.sampler.gather_options), key)

    def describe(self, batch: TensorDict, metrics: Metrics, seconds: float) -> None:
        """Adds what is known of the batch as a whole."""
        metrics.mean("length/mean", batch["response_mask"].sum(-1))
        metrics.largest("length/max", batch["response_mask"].sum(-1).max())
        metrics.add("throughput/tokens_per_s", lengths(batch).sum() / seconds, 1.0 / self.world.size)
        metrics.mean("length/trained", batch["loss_mask"].sum(-1))
        metrics.largest("time/step_s", seconds)
        if "scores" in batch.keys():
            scored = is_scored(batch["scores"])
            metrics.mean("reward/mean", batch["scores"], scored)
            metrics.deviation("reward/std", batch["scores"][scored])
            for name, number in count_unscored(batch).items():
                metrics.count(f"reward/{name}", number)
            metrics.mean("length/truncated", batch["truncated"])
            metrics.mean("staleness/mean", self.step - 1 - batch["version"], batch["response_mask"])
            for name, values in batch["terms"].items():
                metrics.mean(f"reward/{name}", values, is_scored(values))
        metrics.largest("memory/peak_gib", peak_gib(self.world.device))

    def finish(
        self, number: int, stage: Stage, stage_step: int, batch: TensorDict, metrics: Metrics, final: bool
    ) -> bool:
        """Logs the step, evaluates and saves where that is due; True where the stage, the `final` one or not, ends."""
        last, kept = stage_step == stage.steps, self.output.trajectories
        numbers = metrics.reduce(self.world.gather)
        rows, stop = self.world.all_sum(torch.tensor([len(batch), int(self.watch.stop.asked(self.step))])).tolist()
        stage.algorithm.update_controllers(numbers, rows)
        self.ledger.record(stage.name, stage.source, batch, self.watch.nonfinite.dropped_units(POLICY, stage.epochs))
        texts = sampled_texts(batch, kept.rows) if last or self.step % kept.every == 0 else []
        if last or (stage.eval_every > 0 and stage_step % stage.eval_every == 0):
            numbers |= self.evaluate(texts)
        rewarded = self.probe(stage, numbers, texts)
        problem = unscored_problem(numbers, rows, self.watch.max_unscored) or rewarded
        done = last or stage.reached(self.checkpoints.watched, numbers)
        if saves := bool(done or problem or stop or self.checkpoints.due(self.step)):
            numbers |= self.checkpoints.wait_before(self.step, self.log.message)
        self.record(stage.name, numbers, texts)
        if self.warns_of_gap and GAP in numbers and not numbers.get("staleness/mean"):  # older weights explain a gap
            self.warns_of_gap = False  # one warning is enough
            if warning := gap_warning(self.step, numbers):
                self.log.warning(warning)
        self.log.worst_tokens(
            self.step, describe_tokens(metrics.largest_notes(WORST, self.world.gather), self.policy.tokenizer)
        )
        save = partial(self.save, number, stage, stage_step, done, numbers)
        if saves:
            save()
        if problem or stop or (done and final):
            self.checkpoints.end(save, problem)
        if problem or stop:
            raise ValueError(problem) if problem else self.watch.stop.stopped(self.step)
        return done

    def evaluate(self, texts: list[dict[str, Any]]) -> dict[str, float]:
        """Numbers of all held-out sets; their answers are added to the texts."""
        if self.watch.evaluator is None:
            return {}
        self.phase, started = Phase.EVALUATION, time.perf_counter()
        if self.watch.evaluator.samples:
            self.sampler.publish(self.step, self.policy.weights(self.sampler.gather_options), POLICY)
        with at_step(self.step):
            numbers, answers = self.watch.evaluator.run(self.log.progress)
        self.evaluated = self.step
        for name, rows in answers.items():
            texts += [{"set": f"eval/{name}", **row} for row in rows[: self.output.trajectories.rows]]
        return numbers | {"time/eval_s": time.perf_counter() - started}

    def probe(self, stage: Stage, numbers: dict[str, float], texts: list[dict[str, Any]]) -> str:
        """Answers the canary tasks if that is due, adds to the numbers and texts, and says why the run must stop."""
        if self.watch.canary is None or not stage.source.samples() or not self.watch.canary.due(self.step):
            return ""
        self.phase = Phase.EVALUATION
        self.sampler.publish(self.step, self.policy.weights(self.sampler.gather_options), POLICY)
        with at_step(self.step):
            result = self.watch.canary.run(self.step, self.log.progress)
        if result.accuracy is not None:
            numbers[CANARY] = result.accuracy
        texts += [{"set": "canary", **record} for record in result.texts[: self.output.trajectories.rows]]
        return self.watch.canary.problem(result)

    def record(self, stage: str, numbers: dict[str, float], texts: list[dict[str, Any]]) -> None:
        """Logs the numbers and texts of a step and remembers the numbers as the last ones."""
        self.log.log(self.step, stage, numbers)
        if texts:
            self.log.samples(self.step, texts)
        self.numbers = updated(self.numbers, numbers)

    def save(self, number: int, stage: Stage, stage_step: int, done: bool, numbers: dict[str, float]) -> None:
        """Writes a checkpoint: everything that another process needs to resume from this step."""
        self.phase = Phase.CHECKPOINT
        state = {
            "step": self.step,
            "stage": number,
            "stage_step": stage_step,
            "stage_done": done,
            "numbers": self.numbers,
            "config_entries": self.config_entries(),
            "rows": self.output.rows,
            **states(self.parts | stage.parts),
            "actors": self.model_states(number, stage, stage_step),
        }
        self.checkpoints.write(self.step, state, self.save_model, measured(numbers, self.checkpoints.watched), done)
        for text in self.watch.unsaved.changed():
            self.log.warning(text)

    def model_states(self, number: int, stage: Stage, stage_step: int) -> dict[str, dict[str, Any]]:
        """What a checkpoint holds of each model; frozen ones are left out where they are as loaded. A collective."""
        replaced = number > 0 or any(stage.weights_age(key, stage_step) < self.step for key in self.models)
        return {
            key: model.state_dict()
            for key, model in self.models.items()
            if model.optimizer_options is not None or not model.has_weights or replaced
        }

    def save_model(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Writes the policy, with what an evaluation after this step has measured of it. A collective."""
        self.policy.save_model(folder, dtype)
        if self.world.rank == 0 and (entries := self.config_entries()):
            add_to_config(entries, folder)

    def config_entries(self) -> dict[str, float]:
        """What an evaluation after this step has measured that config.json of an export keeps."""
        measured = self.watch.evaluator if self.evaluated == self.step else None
        return {} if measured is None else measured.config_entries()
