"""What happens between the steps of a stage: which models an update trains, and when weights are replaced.

A schedule is registered by name and stands under `algorithm.schedules`, with its options. It is a function of how many
steps of the stage are done, so that a resumed run needs no state of it.
"""

from collections.abc import Collection, Mapping

from rft.actor.base import ColumnModel, trainable
from rft.algorithm.roles import POLICY
from rft.ranges import NonNegativeInt
from rft.registry import Registry

SCHEDULES = Registry("schedule")


class Schedule:
    """The base class of schedules: it changes nothing."""

    def check(self, key: str, steps: int, models: Collection[str], learners: Collection[str]) -> None:
        """Checks the options against the run, before any model is loaded.

        Args:
            key: of the schedule in the yaml.
            steps: of the run.
            models: keys of the models beside the policy.
            learners: those of them that train.

        Raises:
            ValueError: names the key and the cure.
        """

    def trains(self, key: str, stage_step: int) -> bool:
        """True where the model with this key trains in this step of the stage (1 is the first)."""
        return True

    def after_step(self, stage_step: int, models: Mapping[str, ColumnModel]) -> None:
        """Called when the updates of a step are done, before the engine gets new weights. A collective."""

    def weights_age(self, key: str, done: int) -> int:
        """Steps since the weights of a model that never trains were replaced, of the `done` steps of the stage."""
        return done


@SCHEDULES.register("warmup")
class Warmup(Schedule):
    """In the first steps one model trains alone, such as a critic that knows nothing yet (VC-PPO, 2503.01491).

    Args:
        steps: in which the policy does not train.
    """

    def __init__(self, *, steps: NonNegativeInt) -> None:
        self._steps = steps

    def check(self, key: str, steps: int, models: Collection[str], learners: Collection[str]) -> None:
        """Some model must train in every step, and the policy in at least one."""
        if self._steps and not learners:
            raise ValueError(f"{key}.steps={self._steps}: no model would train in these steps; set it to 0")
        if self._steps >= steps > 0:
            raise ValueError(
                f"{key}.steps={self._steps}: the policy would train in none of the steps={steps}; raise steps or lower "
                f"{key}.steps"
            )

    def trains(self, key: str, stage_step: int) -> bool:
        return key != POLICY or stage_step > self._steps


@SCHEDULES.register("iterations")
class Iterations(Schedule):
    """After every n-th step a model becomes a copy of the policy (iterative DPO, 2404.19733).

    Args:
        every: steps; 0 for never.
        model: key of the model.
    """

    def __init__(self, *, every: NonNegativeInt, model: str) -> None:
        self._every = every
        self._model = model

    def check(self, key: str, steps: int, models: Collection[str], learners: Collection[str]) -> None:
        """The model must exist, and must not train."""
        frozen = sorted(set(models) - set(learners))
        if self._every and self._model not in frozen:
            raise ValueError(
                f"{key}.model={self._model!r} is not a frozen model of this run (they are: "
                f"{', '.join(frozen) or 'none'}); choose one of them, or set {key}.every=0"
            )

    def after_step(self, stage_step: int, models: Mapping[str, ColumnModel]) -> None:
        if self._every and stage_step % self._every == 0:
            models[self._model].copy_weights_from(trainable(models[POLICY]))

    def weights_age(self, key: str, done: int) -> int:
        return done % self._every if self._every and key == self._model else done
