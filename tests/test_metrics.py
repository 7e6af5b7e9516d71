"""Means and deviations are those of all values together, however they were spread over micro-batches and ranks."""

import pytest
import torch

from rft.metrics import Metrics

generator = torch.Generator().manual_seed(0)
VALUES = torch.randn(24, 3, generator=generator) * 1e3 + 1e4
MASK = torch.rand(24, 3, generator=generator) < 0.4
SPLITS = {
    "whole": [[list(range(24))]],
    "micro-batches": [[[0], list(range(1, 20)), [20, 21, 22, 23]]],
    "ranks": [[list(range(24))[0::2]], [list(range(24))[1::2]]],
    "both": [[[5, 6], [0]], [[1, 2, 3, 4], [7]], [list(range(8, 24))]],
    "an idle rank": [[list(range(24))], [[]]],
    "a rank that never said the name": [[list(range(24))], []],
}


def reduced(ranks):
    """What every rank gets: each is handed the list of all."""
    handed = []
    for metrics in ranks:
        metrics.reduce(lambda mine: handed.append(mine) or [mine])
    results = [metrics.reduce(lambda _: handed) for metrics in ranks]
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("split", SPLITS)
def test_any_split_gives_the_global_numbers(split):
    ranks = []
    for parts in SPLITS[split]:
        metrics = Metrics()
        for rows in parts:
            metrics.mean("rows", VALUES[rows, 0])
            metrics.mean("tokens", VALUES[rows], MASK[rows])
            metrics.deviation("std", VALUES[rows, 0])
            metrics.effective_share("share", VALUES[rows], MASK[rows])
            metrics.add("ratio", VALUES[rows, 0].double().sum(), VALUES[rows, 1].double().sum())
            for value in VALUES[rows, 0]:
                metrics.largest("most", value)
        ranks.append(metrics)
    numbers, exact = reduced(ranks), VALUES.double()
    assert numbers["rows"] == pytest.approx(float(exact[:, 0].mean()), rel=1e-13)
    assert numbers["tokens"] == pytest.approx(float(exact[MASK].mean()), rel=1e-13)
    assert numbers["std"] == pytest.approx(float(exact[:, 0].std()), rel=1e-10)
    kept = exact[MASK]
    assert numbers["share"] == pytest.approx(float(kept.mean() ** 2 / kept.square().mean()), rel=1e-13)
    assert numbers["ratio"] == pytest.approx(float(exact[:, 0].sum() / exact[:, 1].sum()), rel=1e-13)
    assert numbers["most"] == float(VALUES[:, 0].max())


def test_values_by_hand():
    metrics = Metrics()
    metrics.mean("mean", torch.tensor([1.0, 2.0]))
    metrics.mean("mean", torch.tensor([6.0]))
    metrics.mean("masked", torch.tensor([1.0, float("nan"), 4.0]), torch.tensor([True, False, True]))
    metrics.mean("flags", torch.tensor([True, False, False, False]))
    metrics.mean("counts", torch.tensor([3, 4]))
    metrics.deviation("std", torch.tensor([1.0, 2.0]))
    metrics.deviation("std", torch.tensor([3.0]))
    metrics.add("share", 3.0, 0.0)
    metrics.add("share", 1.0, 0.5)
    numbers = reduced([metrics])
    assert numbers == {"mean": 3.0, "masked": 2.5, "flags": 0.25, "counts": 3.5, "std": 1.0, "share": 8.0}


def test_what_was_measured_on_nothing_is_left_out():
    metrics = Metrics()
    metrics.mean("masked", torch.ones(3), torch.zeros(3, dtype=torch.bool))
    metrics.mean("empty", torch.ones(0))
    metrics.deviation("std", torch.ones(0))
    metrics.effective_share("share", torch.ones(3), torch.zeros(3, dtype=torch.bool))
    metrics.effective_share("none", torch.zeros(3), torch.ones(3, dtype=torch.bool))
    assert reduced([metrics, Metrics()]) == {}


def test_effective_share_by_hand():
    """Weights 1, 1, 4: (6 / 3)^2 / (18 / 3)."""
    metrics, nan = Metrics(), float("nan")
    metrics.effective_share("share", torch.tensor([1.0, nan]), torch.tensor([True, False]))
    metrics.effective_share("share", torch.tensor([1.0, 4.0]), torch.tensor([True, True]))
    assert reduced([metrics]) == {"share": pytest.approx(2 / 3, rel=1e-15)}


def test_a_single_value_has_no_deviation():
    metrics = Metrics()
    metrics.deviation("std", torch.tensor([5.0]))
    assert reduced([metrics]) == {"std": 0.0}


def test_small_deviations_of_large_numbers_survive():
    ranks = []
    for part in ([1e8, 1e8 + 1], [1e8 + 2]):
        ranks.append(Metrics())
        ranks[-1].deviation("std", torch.tensor(part, dtype=torch.float64))
    assert reduced(ranks)["std"] == pytest.approx(1.0, rel=1e-9)


def test_a_timer_adds_up_and_the_slowest_rank_counts(monkeypatch):
    ranks, clock = [Metrics(), Metrics()], [0.0]
    monkeypatch.setattr("rft.metrics.time.perf_counter", lambda: clock[0])
    for metrics, seconds in zip(ranks, ([1.0], [2.0, 0.5]), strict=True):
        for number in seconds:
            with metrics.timer("update"):
                clock[0] += number
    assert reduced(ranks)["time/update_s"] == 2.5


def test_gradients_are_let_go():
    metrics, leaf = Metrics(), torch.ones(2, requires_grad=True)
    metrics.mean("mean", leaf * 2)
    metrics.deviation("std", leaf * 2)
    assert reduced([metrics]) == {"mean": 2.0, "std": 0.0}


def test_the_numbers_of_a_step_leave_the_device_in_one_copy(monkeypatch):
    """Each copy of a single number would wait for a GPU."""
    copies = []
    tolist = torch.Tensor.tolist

    def counted(tensor):
        copies.append(len(tensor))
        return tolist(tensor)

    metrics = Metrics()
    for number in range(3):
        metrics.add("a", torch.tensor(number + 0.1, dtype=torch.float32), torch.tensor(2))
        metrics.add("b", 1.0, 3)
    metrics.effective_share("c", torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    monkeypatch.setattr(torch.Tensor, "__float__", None)
    monkeypatch.setattr(torch.Tensor, "item", None)
    found = metrics.reduce(lambda own: [own])
    assert found == {"a": pytest.approx(3.3 / 6, rel=1e-6), "b": pytest.approx(1 / 3), "c": 0.8} and copies == [5]
