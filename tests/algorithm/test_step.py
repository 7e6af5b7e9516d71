"""A mini-batch without some of its rows is prepared as if they had never been in it."""

import math

import pytest
import torch

from rft.algorithm.step import MiniBatch, StepContext
from rft.batch.balance import Balance
from rft.distributed import SINGLE_PROCESS, start
from rft.metrics import Metrics
from tests.helpers import make_batch, plain_algorithm

KTO = {"name": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
OTHERS = [0, 1, 2, 4, 5, 6, 7]  # the rows but that of unit 3


@pytest.fixture
def prepare():
    """What is prepared of a mini-batch."""
    balance = Balance(SINGLE_PROCESS, lambda rows: torch.ones(len(rows)), "unit", moves=True)
    return lambda part: part.prepare(StepContext({}, balance, start("cpu"), part.batch, 1.0, Metrics(), 1, 0))


def mini_batch(algorithm, rows, batch=None):
    return MiniBatch(algorithm, rows if batch is None else batch, rows, {"logprobs": rows["old_logprobs"]}, 0)


def test_the_statistics_of_a_loss_are_those_of_the_rows_that_are_left(prepare):
    batch = make_batch()
    batch["label"], batch["mismatched"] = torch.arange(8) % 2 == 0, torch.arange(8) > 4
    batch["old_logprobs"] = batch["old_logprobs"] + 1.0  # above the reference: a baseline that is not 0
    expected = prepare(mini_batch(algorithm := plain_algorithm(loss=KTO, aggregation=None), batch[OTHERS])).rows
    assert expected["kl_baseline"].gt(0).all() and expected["unit_weights"].sum() == pytest.approx(1.0)
    batch["old_logprobs"][3] = math.nan
    batch["mismatched"][3] = True
    part = mini_batch(algorithm, batch)
    assert prepare(part).rows["kl_baseline"].isnan().all()
    found = prepare(part.without([3])).rows
    assert found["unit"].tolist() == OTHERS
    for name in ("kl_baseline", "label_scale", "loss_mask", "unit_weights"):
        assert found[name].equal(expected[name])


def test_a_dummy_row_is_none_of_those_that_are_left_out_and_finite(prepare):
    batch, algorithm = make_batch(), plain_algorithm()
    batch["advantages"][1] = math.nan
    dummy = prepare(mini_batch(algorithm, batch[2:3], batch).without([0])).dummy
    assert dummy["unit"].tolist() == [1] and not dummy["advantages"].any()
    alone = prepare(mini_batch(algorithm, batch[1:2]).without([1]))
    assert len(alone.rows) == 0 and alone.dummy["unit"].tolist() == [1] and not alone.dummy["advantages"].any()
    assert batch["advantages"][1].isnan().all(), "the batch is as it was"
