"""Which models train in a step of a stage, and when weights are replaced."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

from rft.actor.base import TrainableModel
from rft.setup.assembly import Job
from rft.train.schedules import SCHEDULES, Schedule
from rft.train.stage import Stage


def schedule(**node):
    return SCHEDULES.build(node, "algorithm.schedules.it")()


def stage(*schedules, steps=6, minibatches=2, epochs=3):
    nothing = dict.fromkeys(("source", "algorithm", "optimizer", "stop_at"))
    sizes = {"steps": steps, "minibatches": minibatches, "epochs": epochs, "eval_every": 0}
    return Stage(name="train", sampler="actor", schedules=list(schedules), **sizes, **nothing)


class Model(TrainableModel):
    """A model of which only the copies are looked at."""

    def __init__(self):
        self.copied = []

    def copy_weights_from(self, other):
        self.copied.append(other)


Model.__abstractmethods__ = frozenset()


def test_without_schedules_all_models_train_and_none_is_replaced():
    alone = stage()
    assert alone.trains("actor", 1) and alone.trains("critic", 6)
    assert alone.updates("actor") == alone.updates("critic") == 36
    assert [alone.weights_age("reference", done) for done in range(4)] == [0, 1, 2, 3]


def test_the_policy_does_not_train_in_the_steps_of_a_warmup():
    warm = stage(schedule(name="warmup", steps=2))
    assert [warm.trains("actor", step) for step in range(1, 7)] == [False, False, True, True, True, True]
    assert all(warm.trains("critic", step) for step in range(1, 7))
    assert warm.updates("actor") == 24 and warm.updates("critic") == 36


def test_after_every_iteration_the_model_is_a_copy_of_the_policy():
    policy, reference = Model(), Model()
    often = stage(schedule(name="iterations", every=3, model="reference"))
    counts = []
    for step in range(1, 8):
        often.after_step(step, {"actor": policy, "reference": reference})
        counts.append(len(reference.copied))
    assert counts == [0, 0, 1, 1, 1, 2, 2]
    assert all(other is policy for other in reference.copied) and not policy.copied
    assert [often.weights_age("reference", done) for done in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [often.weights_age("teacher", done) for done in (3, 4)] == [3, 4]


def test_an_iteration_of_no_steps_never_ends():
    never = stage(schedule(name="iterations", every=0, model="reference"))
    never.after_step(5, SimpleNamespace())  # no model is looked up
    assert never.weights_age("reference", 5) == 5


def test_an_unknown_schedule_is_refused_by_its_key():
    with pytest.raises(
        ValueError, match=r"^algorithm\.schedules\.it\.name: no schedule is called 'iteration'; did you"
    ):
        schedule(name="iteration", every=1, model="reference")


@pytest.mark.parametrize(
    ("node", "models", "learners", "message"),
    [
        ({"name": "warmup", "steps": 2}, ("reference",), (), "it.steps=2: no model would train in these steps; "),
        ({"name": "warmup", "steps": 6}, ("critic",), ("critic",), "it.steps=6: the policy would train in none of the"),
        (
            {"name": "iterations", "every": 2, "model": "critic"},
            ("reference", "critic"),
            ("critic",),
            "it.model='critic' is not a frozen model of this run (they are: reference); ",
        ),
    ],
)
def test_options_that_do_not_fit_the_run_are_refused_by_key(node, models, learners, message):
    with pytest.raises(ValueError) as error:
        schedule(**node).check("it", 6, models, learners)
    assert str(error.value).startswith(message)


def test_options_that_fit_the_run_are_accepted():
    for node in (
        {"name": "warmup", "steps": 0},
        {"name": "warmup", "steps": 5},
        {"name": "iterations", "every": 0, "model": "nothing"},
        {"name": "iterations", "every": 7, "model": "reference"},
    ):
        schedule(**node).check("it", 6, ("reference", "critic"), ("critic",))


def test_a_schedule_that_is_set_beside_its_option_of_the_algorithm_is_checked(tiny):
    with pytest.raises(ValueError, match=r"^algorithm\.schedules\.critic_warmup\.steps=2: no model would train"):
        Job(tiny("algorithm.schedules.critic_warmup.steps=2"))
    with pytest.raises(ValueError, match=r"^algorithm\.schedules\.iterations\.model='judge' is not a frozen model"):
        Job(tiny("algorithm.iteration=2", "algorithm/terms=[kl]", "algorithm.schedules.iterations.model=judge"))


@SCHEDULES.register("every_second_step")
class EverySecondStep(Schedule):
    """A schedule of one's own: the policy trains in every second step."""

    seen: ClassVar[list[int]] = []

    def trains(self, key, stage_step):
        return key != "actor" or stage_step % 2 == 0

    def after_step(self, stage_step, models):
        self.seen.append(stage_step)


def test_a_run_takes_a_schedule_that_is_registered_elsewhere(tiny):
    config = tiny("steps=4", "warmup=none", "eval.every=1")
    config["algorithm"]["schedules"]["second"] = {"name": "every_second_step"}
    EverySecondStep.seen.clear()
    Job(config).fit("")
    assert EverySecondStep.seen == [1, 2, 3, 4]
