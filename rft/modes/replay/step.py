"""Takes one step of a run again: the steps before it from a checkpoint, then its rows, then its updates."""

import copy
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from rft.actor.base import ModelContext
from rft.algorithm.algorithm import Algorithm
from rft.batch.columns import lengths
from rft.batch.scores import number_or_none
from rft.data.datasets import Datasets
from rft.distributed import World
from rft.errors import Stopped, at_step
from rft.logger.log import SilentLog
from rft.metrics import Metrics
from rft.modes.replay.recorder import ROW, RecordedMetrics, RecordedObjective, StepRecord, StepRecorder
from rft.setup.assembly import Changes, Job
from rft.train.checkpoint.checkpoints import SavedState
from rft.train.checkpoint.names import step_of
from rft.train.checkpoint.options import CheckpointOptions
from rft.train.folder.run_folder import REF_LOGPROBS, RunFolder

BEFORE_ALL = -1  # number of the stage in a state from before the first one


class ReplayJob(Job):
    """The run, whose updates are recorded. Its config is not typed: it is that of the run folder."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.recorder = StepRecorder()
        super().__init__(config, typed={})
        once = CheckpointOptions(
            every=0, keep_last=1, keep_best=0, keep_every=0, export_every=1, fallback=None, export_dtype="auto"
        )
        self.run = replace(self.run, checkpoint=once, profile=replace(self.run.profile, steps=[]), max_time=None)

    def model_context(self, world: World, loaded: Datasets) -> ModelContext:
        """The context of the models, with the hooks that record."""
        return replace(super().model_context(world, loaded), hooks=self.recorder)


@dataclass(frozen=True)
class Taken:
    """A step that was taken.

    Attributes:
        numbers: its metrics; None for one that is not finite.
        record: its updates.
    """

    numbers: dict[str, float | None]
    record: StepRecord


class Replay:
    """A step of a run that can be taken several times, with the same weights and the same rows.

    Args:
        job: the run.
        world, loaded: the processes and the data.
        folder: for temporary files.
        run: the run folder, which is only read.
        start: the checkpoint to begin from; None for the beginning of the run.
        output: gets the rows of an update that is not finite.
        step: its number.

    Attributes:
        rows: of this rank, before the algorithm adds columns; set by `prepare`.
    """

    rows: TensorDict

    def __init__(
        self,
        job: ReplayJob,
        world: World,
        loaded: Datasets,
        folder: Path,
        run: Path,
        start: Path | None,
        output: Path,
        step: int,
    ) -> None:
        self._job, self._world, self._folder, self._step = job, world, folder, step
        if (known := run.resolve() / REF_LOGPROBS).exists():
            world.decide(lambda: (folder / REF_LOGPROBS).symlink_to(known))
        chosen = RunFolder(folder, [], start, job.run_command(""))
        changes = Changes(faults=output, last_step=step - 1, evaluates=evaluation_decides(job, start), probes=False)
        self._trainer, self._stages = job.assemble(world, loaded, folder, SilentLog(), chosen, changes)

    def prepare(self) -> None:
        """Takes the steps before this one, and draws its rows. A collective."""
        trainer, step = self._trainer, self._step
        self._saved = self._state_before()
        self._number, self._stage = next(
            (number, stage) for number, stage in enumerate(self._stages) if not stage.ended(number, self._saved)
        )
        trainer.step, trainer.numbers = step - 1, self._saved["numbers"]
        trainer.watch.nonfinite.load_state_dict(self._saved["faults"])
        trainer.precompute(self._stage, None)
        self._done = trainer.begin(self._number, self._stage, self._saved)
        trainer.precompute(self._stage, self._done)
        self._memory = copy.deepcopy(self._stage.algorithm.state_dict())
        if self._stage.source.samples():
            trainer.publish(self._stage, self._done)
        trainer.step, metrics = step, Metrics()
        with at_step(step):
            self.rows = self._stage.source.next(metrics)
        trainer.sampler.release()
        self._numbers = metrics.reduce(self._world.gather)
        self._shape = self._number_rows()

    def _number_rows(self) -> tuple[int, int]:
        """Numbers the rows of all ranks by their groups and units; returns how many there are, and their tokens."""
        world, rows = self._world, self.rows
        places = zip(rows["group"].tolist(), rows["unit"].tolist(), strict=True)
        local = [(*place, world.rank, number) for number, place in enumerate(places)]
        all_places = sorted(place for rank_places in world.gather(local) for place in rank_places)
        numbers = {place: row for row, place in enumerate(all_places)}
        rows[ROW] = torch.tensor([numbers[place] for place in local])
        return len(numbers), max(world.gather(rows["response_mask"].shape[1]))

    def take(self, algorithm: Algorithm | None) -> Taken:
        """Takes the step from the state before it. A collective.

        Args:
            algorithm: None for that of the run, with which the step is taken first.
        """
        trainer, stage = self._trainer, self._stage
        trainer.begin(self._number, stage, self._saved)
        record = StepRecord(self._world, self._shape, self._folder, reference=algorithm is None)
        if algorithm is not None:
            algorithm.load_state_dict(remembered(algorithm, stage.algorithm, self._memory))
            stage = replace(stage, algorithm=algorithm)
        stage.algorithm.policy = RecordedObjective(stage.algorithm.policy, record)
        batch, metrics, started = self.rows.clone(), RecordedMetrics(record), time.perf_counter()
        with at_step(trainer.step), self._job.recorder.recording(record):
            context = trainer.compute_columns(stage, batch, metrics)
            trainer.update(stage, self._done + 1, batch, context)
            trainer.describe(batch, metrics, time.perf_counter() - started)
        record.reduce()
        numbers = self._numbers | metrics.reduce(self._world.gather)
        return Taken({name: number_or_none(number) for name, number in numbers.items()}, record)

    def token_ids(self) -> dict[int, list[int]]:
        """Token ids of the rows of all ranks, by their numbers. A collective."""
        columns = (self.rows[ROW], self.rows["tokens", "input_ids"], lengths(self.rows))
        rows = zip(*(column.tolist() for column in columns), strict=True)
        local = {row: ids[:length] for row, ids, length in rows}
        return {row: ids for part in self._world.gather(local) for row, ids in part.items()}

    def close(self) -> None:
        """Ends what samples ahead, the engine and the reward."""
        self._trainer.checkpoints.close()
        for stage in self._stages:
            stage.source.close()
        self._trainer.sampler.close()
        self._job.reward.close()

    def _state_before(self) -> SavedState:
        """The state with which the step began; the steps since the checkpoint are taken again."""
        trainer, latest = self._trainer, self._trainer.checkpoints.latest()
        if latest is None and self._step == 1:
            save = partial(trainer.save, BEFORE_ALL, self._stages[0], 0, True, {})
            save()
            trainer.checkpoints.end(save)
        elif step_of(latest) < self._step - 1:
            with suppress(Stopped):
                trainer.fit(self._stages)
        saved = trainer.checkpoints.read()
        assert saved is not None
        return saved


def evaluation_decides(job: Job, start: Path | None) -> bool:
    """Whether an evaluation decides when a stage ends that is not over: the warm-up, with `warmup.stop_at`.

    Args:
        start: the checkpoint to begin from; None for the beginning of the run.
    """
    if job.run.warmup is None or job.run.warmup.stop_at is None:
        return False
    if start is None:
        return True
    saved = SavedState(start)
    return bool(saved["stage"] == 0 and not saved["stage_done"])


def remembered(algorithm: Algorithm, run: Algorithm, state: dict[str, Any]) -> dict[str, Any]:
    """The state with which an algorithm begins a step of a run that had another algorithm.

    A coefficient, a shaping or an advantage with the options of the run keeps its state. A changed one has its initial
    state.

    Args:
        state: that of the algorithm of the run.
    """
    own, options, before = algorithm.state_dict(), algorithm.options, run.options

    def kept(name: str) -> dict[str, Any]:
        new, old = vars(options)[name], vars(before)[name]
        return {key: state[name][key] if key in old and old[key] == new[key] else own[name][key] for key in own[name]}

    reward_kl = state if options.reward_kl == before.reward_kl else own
    advantage = state if options.advantage == before.advantage else own
    return {
        "reward_kl": reward_kl["reward_kl"],
        "terms": kept("terms"),
        "shaping": kept("shaping"),
        "advantage": advantage.get("advantage", {}),
    }
