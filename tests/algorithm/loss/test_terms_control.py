"""Controls of a coefficient: by hand, over a checkpoint, and what they refuse."""

import pytest

from rft.algorithm import CONTROLS
from rft.algorithm.loss.terms import AdaptiveKL, TargetEntropy
from rft.algorithm.objective import Control, build_control


def test_a_number_is_a_fixed_coefficient():
    control = build_control(0.05, "terms.kl.coef")
    control.update(measured=100.0, rows=1000)
    control.load_state_dict(control.state_dict())
    assert control.coef == 0.05


ADAPTIVE = {"name": "adaptive", "initial": 0.5, "target": 2.0, "horizon": 100.0}


def test_adaptive_control_by_hand():
    control = build_control(ADAPTIVE, "terms.kl.coef")
    control.update(measured=2.2, rows=10)  # error 0.1
    assert control.coef == pytest.approx(0.5 * 1.01, rel=1e-12)
    control.update(measured=200.0, rows=10)  # error 99, clipped to 0.2
    assert control.coef == pytest.approx(0.5 * 1.01 * 1.02, rel=1e-12)
    control.update(measured=0.0, rows=50)  # error -1, clipped to -0.2
    assert control.coef == pytest.approx(0.5 * 1.01 * 1.02 * 0.9, rel=1e-12)


def test_adaptive_control_resumes():
    control = AdaptiveKL(initial=0.5, target=2.0, horizon=100.0)
    control.update(measured=200.0, rows=10)
    resumed = AdaptiveKL(initial=0.5, target=2.0, horizon=100.0)
    resumed.load_state_dict(control.state_dict())
    assert resumed.coef == control.coef != 0.5


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("much", r"terms\.kl\.coef: expected number, got 'much'"),
        (True, r"terms\.kl\.coef: expected number, got True"),
        ({"name": "adaptve"}, r"terms\.kl\.coef\.name: .*did you mean adaptive"),
        (ADAPTIVE | {"target": 0.0}, r"terms\.kl\.coef\.target=0\.0: it must be above 0"),
        (ADAPTIVE | {"horizon": -1}, r"terms\.kl\.coef\.horizon=-1: it must be above 0"),
        ({"name": "adaptive", "initial": 0.5, "target": 2.0}, r"terms\.kl\.coef\.horizon is missing"),
    ],
)
def test_a_wrong_control_names_its_key(node, message):
    with pytest.raises(ValueError, match=message):
        build_control(node, "terms.kl.coef")


TARGET = {"name": "target_entropy", "initial": 0.01, "target": 0.2, "step": 0.005}


def test_target_entropy_by_hand():
    control = build_control(TARGET, "terms.entropy.coef")
    assert control.coef == 0.01
    for entropy, coef in [
        (0.1, 0.015),  # too low: up
        (0.15, 0.02),
        (0.2, 0.02),  # met: stays, and is applied
        (0.3, 0.0),  # too high: down to 0.015, and not applied
        (0.1, 0.02),  # up from 0.015
        (0.3, 0.0),
        (0.3, 0.0),
        (0.3, 0.0),
        (0.3, 0.0),
        (0.3, 0.0),  # not below 0
        (0.2, 0.0),
        (0.1, 0.005),
    ]:
        control.update(measured=entropy, rows=7)
        assert control.coef == pytest.approx(coef, abs=1e-12), entropy


def test_target_entropy_resumes():
    control = TargetEntropy(initial=0.01, target=0.2, step=0.005)
    control.update(measured=0.3, rows=1)
    resumed = TargetEntropy(initial=0.01, target=0.2, step=0.005)
    resumed.load_state_dict(control.state_dict())
    assert resumed.coef == control.coef == 0
    resumed.update(measured=0.1, rows=1)
    assert resumed.coef == pytest.approx(0.01, abs=1e-12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"initial": -0.1}, r"terms\.entropy\.coef\.initial=-0\.1: it must be at least 0"),
        ({"target": 0.0}, r"terms\.entropy\.coef\.target=0\.0: it must be above 0"),
        ({"step": -1.0}, r"terms\.entropy\.coef\.step=-1\.0: it must be above 0"),
    ],
)
def test_a_wrong_target_entropy_names_its_key(wrong, message):
    with pytest.raises(ValueError, match=message):
        build_control(TARGET | wrong, "terms.entropy.coef")


class Grows(Control):
    """Changes and is not saved."""

    def __init__(self, *, step: float) -> None:
        super().__init__(0.0)
        self.step = step

    def update(self, measured, rows):
        self.coef += self.step


def test_a_control_that_no_checkpoint_would_save_is_refused(monkeypatch):
    monkeypatch.setattr(CONTROLS, "_entries", dict(CONTROLS._entries))
    CONTROLS.register("grows")(Grows)
    with pytest.raises(
        ValueError, match=r"^terms\.kl\.coef\.name=grows: the control changes in `update` and has no `s"
    ):
        build_control({"name": "grows", "step": 0.1}, "terms.kl.coef")
    monkeypatch.setattr(Grows, "state_dict", lambda self: {"coef": self.coef})
    assert build_control({"name": "grows", "step": 0.1}, "terms.kl.coef").coef == 0.0
