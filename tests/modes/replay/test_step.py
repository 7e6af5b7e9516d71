"""What an algorithm begins a replayed step with."""

from rft.algorithm.check import build_algorithm
from rft.algorithm.options import AlgorithmOptions
from rft.modes.replay.step import remembered
from tests.helpers import METHOD


def algorithm(coef, **changes):
    terms = {"kl": {"name": "kl", "estimator": "k3", "coef": coef}, "entropy": {"name": "entropy", "coef": 0.02}}
    return build_algorithm(AlgorithmOptions(**METHOD | {"terms": terms} | changes), "algorithm", {})


def adaptive(initial):
    return {"name": "adaptive", "initial": initial, "target": 0.1, "horizon": 10.0}


def test_an_unchanged_coefficient_has_its_state_and_a_changed_one_begins_anew():
    run = algorithm(adaptive(0.3))
    state = run.state_dict() | {"terms": {"kl": {"coef": 0.7}, "entropy": {}}}
    for command, expected in ((algorithm(adaptive(0.3)), 0.7), (algorithm(adaptive(0.2)), 0.2), (algorithm(0.1), 0.1)):
        command.load_state_dict(remembered(command, run, state))
        assert command.policy.terms[1].coef.coef == expected
    alone = algorithm(0.1, terms={})
    assert remembered(alone, run, state)["terms"] == {}, "a term that the command lacks"
    assert remembered(run, alone, alone.state_dict())["terms"]["kl"] == {"coef": 0.3}, "a new term"
