"""Steps of a run alone: no warm-up, no evaluation, no checkpoint, no log and no report."""

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from rft.logger.log import SilentLog
from rft.metrics import Metrics
from rft.setup.assembly import Job


class TrainStage:
    """The last stage of a run, and its models as they are before any step.

    Args:
        config: of the run.
        folder: that nothing is written into.

    Attributes:
        job, trainer, stage: of the run.
    """

    def __init__(self, config, folder):
        self.job = Job(config)
        world = self.job.join()
        self.trainer, stages = self.job.assemble(world, self.job.prepare(world), folder, SilentLog())
        self.stage, self._number = stages[-1], len(stages) - 1
        models = self.trainer.models
        self._initial = {key: copy.deepcopy(model.state_dict()) for key, model in models.items() if model.has_weights}
        self.trainer.begin(self._number, self.stage, None)

    def rows(self, metrics=None):
        """The rows of the next step, sampled with the present weights where they are sampled."""
        if self.stage.source.samples():
            self.trainer.publish(self.stage, self.trainer.step)
        return self.stage.source.next(Metrics() if metrics is None else metrics)

    def take(self, rows, metrics=None):
        """Takes a step with a copy of these rows; returns its numbers."""
        metrics, batch = Metrics() if metrics is None else metrics, rows.clone()
        self.trainer.step += 1
        step = self.trainer.compute_columns(self.stage, batch, metrics)
        self.trainer.update(self.stage, self.trainer.step, batch, step)
        self.trainer.describe(batch, metrics, 1.0)
        return metrics.reduce(self.trainer.world.gather)

    def step(self):
        """Takes a step with its own rows; returns its numbers, those of the sampling too."""
        metrics = Metrics()
        return self.take(self.rows(metrics), metrics)

    def begin(self, algorithm):
        """Restarts the stage with the first weights and another algorithm."""
        for key, state in self._initial.items():
            self.trainer.models[key].load_state_dict(state)
        self.trainer.step, self.stage = 0, replace(self.stage, algorithm=algorithm)
        self.trainer.begin(self._number, self.stage, None)

    def weights(self):
        """A copy of the weights of the policy."""
        return {name: tensor.detach().clone() for name, tensor in self.trainer.policy.weights()}

    def close(self):
        """Ends the engine and the reward."""
        self.trainer.sampler.close()
        self.job.reward.close()


@contextmanager
def stages(config_of, folder):
    """A function that makes the last stage of a run from its overrides. Its stages are closed at the end."""
    with ExitStack() as at_the_end:

        def make(*overrides):
            stage = TrainStage(config_of(*overrides), folder)
            at_the_end.callback(stage.close)
            return stage

        yield make
