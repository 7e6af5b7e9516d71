"""`mode=doctor`: builds the run as mode=train does, in a temporary folder, and examines it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rft.actor.base import TrainableModel, trainable
from rft.data.base import given_texts
from rft.data.datasets import Datasets
from rft.distributed import World
from rft.logger.log import SilentLog
from rft.modes.doctor.examine import Examination
from rft.modes.doctor.overriding_sampler import OverridingSampler
from rft.modes.doctor.report import DoctorReport
from rft.rollout.sampler import EngineSampler
from rft.setup.assembly import Changes, Job
from rft.train.folder.run_folder import scratch

PROMPTS = 8  # prompts of each rank, at most


class DoctorJob(Job):
    """A run with a sampler that the doctor controls."""

    def start_sampler(self, world: World, policy: TrainableModel, loaded: Datasets, folder: Path) -> EngineSampler:
        return OverridingSampler(super().start_sampler(world, policy, loaded, folder).engine)


def run(config: dict[str, Any], console: Console) -> float:
    """Prints how much the log-probabilities of engine and trainer differ on a few prompts, and why; does not train.

    Args:
        config: the resolved config as plain containers.
        console: of rank zero.

    Returns:
        The largest gap.

    Raises:
        ValueError: a check fails (names the likely cause), or every step of the algorithm has given texts.
    """
    job = DoctorJob(config)
    run = job.run
    job.source.options = job.source.options.always_sampled()
    if given_texts(job.source.factory, job.source.options) is not None:
        raise ValueError(
            f"mode=doctor: algorithm={run.algorithm.name} has no step with sampled texts only; choose another algorithm"
        )
    world = job.join()
    with job.watchdog(world):
        return examine(job, world, console)


def examine(job: DoctorJob, world: World, console: Console) -> float:
    """Loads the data and the models, and examines a step; otherwise as `run`."""
    run, loaded = job.run, job.prepare(world)
    run.batch = replace(run.batch, prompts=min(run.batch.prompts, PROMPTS * world.size), minibatches=1, epochs=1)
    with scratch(world, run.output_dir, run.mode) as folder:
        trainer, stages = job.assemble(world, loaded, folder, SilentLog(), changes=Changes(ahead=False))

        def twin(dtype: str) -> TrainableModel:
            """A copy of the policy that computes in this dtype."""
            plain = job.strategy.factory(options=job.strategy.options.reference_options(dtype), world=world)
            options = replace(job.actor.options, optimizer=None, lora=None, ema=None)
            context = job.policy_context(world, plain, loaded.tokenizer, loaded.encoder)
            actor = trainable(job.actor.factory(context=context, options=options))
            actor.copy_weights_from(trainer.policy)
            return actor

        try:
            stage = replace(stages[-1], optimizer=replace(stages[-1].optimizer, lr=0.0))
            return Examination(job, trainer, stage, twin, DoctorReport(world, console)).examine()
        finally:
            trainer.sampler.close()
