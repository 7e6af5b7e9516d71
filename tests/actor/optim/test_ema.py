"""The average of the weights by hand, its state, and what is refused."""

import pytest
import torch
from torch import nn

from rft.actor.optim.ema import WeightAverage
from rft.distributed import start
from rft.setup.assembly import Job
from tests.helpers import close, job, make_strategy
from tests.strategy import updates_on_ranks


@pytest.fixture
def network():
    strategy = make_strategy(start("cpu"))
    module = nn.Linear(2, 1)
    module.bias.requires_grad_(False)
    strategy.shard(module, [])
    return module, strategy


def move(module, value):
    with torch.no_grad():
        module.weight.fill_(value)


def value(module):
    return [round(number, 6) for number in module.weight.full_tensor().flatten().tolist()]


def test_the_average_by_hand(network):
    module = network[0]
    move(module, 100.0)  # before the first update: has no part in it
    average = WeightAverage(module, 0.5)
    seen = []
    for weight in (8.0, 2.0, 9.0):
        move(module, weight)
        average.update()
        with average.in_network():
            seen.append(value(module))
        assert value(module) == [weight] * 2
    # 8; (8/2 + 2) / (1/2 + 1) = 4; (8/4 + 2/2 + 9) / (1/4 + 1/2 + 1) = 48/7
    assert seen == [[8.0] * 2, [4.0] * 2, [round(48 / 7, 6)] * 2]


def test_before_an_update_there_is_nothing(network):
    module = network[0]
    move(module, 3.0)
    average = WeightAverage(module, 0.5)
    with average.in_network():
        assert value(module) == [3.0] * 2
    assert average.state_dict()["updates"] == 0


def test_the_weights_come_back_after_an_error(network):
    module = network[0]
    average = WeightAverage(module, 0.5)
    for weight in (1.0, 2.0):
        move(module, weight)
        average.update()
    with pytest.raises(OSError), average.in_network():
        raise OSError("no space left")
    assert value(module) == [2.0] * 2


def test_a_state_goes_on(network):
    module = network[0]
    averages = [WeightAverage(module, 0.9) for _ in range(2)]
    for weight in (1.0, 5.0):
        move(module, weight)
        averages[0].update()
    state = averages[0].state_dict()
    assert list(state["weights"]) == ["weight"], "what is frozen is not in it"
    averages[1].load_state_dict(state)
    assert value(module) == [5.0] * 2
    move(module, -7.0)
    for average in averages:
        average.update()
    first, second = (average.state_dict() for average in averages)
    assert first["updates"] == second["updates"] == 3
    assert torch.equal(first["weights"]["weight"], second["weights"]["weight"])


def test_it_takes_the_bytes_of_what_trains_and_null_takes_none():
    world = start("cpu")
    states = {ema: updates_on_ranks.perform(job(actor={"ema": ema, "frozen": ["model.layers.0.*"]}), world)["state"]
              for ema in (None, 0.9)}  # fmt: skip
    assert "average" not in states[None]
    average = states[0.9]["average"]["weights"]
    assert average.keys() == states[0.9]["optimizer"]["state"].keys()
    assert {tensor.dtype for tensor in average.values()} == {torch.float32}


def test_updates_are_averaged_and_stay_the_same():
    world = start("cpu")
    each = [updates_on_ranks.perform(job(updates=count, cap=30), world)["weights"] for count in (1, 2, 3)]
    found = updates_on_ranks.perform(job(updates=3, cap=30, actor={"ema": 0.5}), world)
    close(found["weights"], each[2], 0.0)
    by_hand = {name: (each[0][name] / 4 + each[1][name] / 2 + each[2][name]) / 1.75 for name in each[0]}
    close(found["state"]["average"]["weights"], by_hand, 1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "critic.ema=0.9",
            r"^critic\.ema=0\.9: checkpoints hold the average of the actor alone; set critic\.ema=null$",
        ),
        (
            "actor.ema=1.0",
            r"^actor\.ema=1\.0: it must be below 1$",
        ),
        ("actor.ema=0", r"^actor\.ema=0: it must be above 0$"),
    ],
)
def test_what_is_refused(change, said, tiny):
    with pytest.raises(ValueError, match=said):
        Job(tiny("algorithm=ppo", change))
