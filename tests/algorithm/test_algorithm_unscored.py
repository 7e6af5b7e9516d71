"""A row without a score trains nothing, and every other row trains as in a batch without it."""

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm.certificate.policy import term_weights
from rft.algorithm.certificate.sample import KEEP, sample
from rft.metrics import Metrics
from tests.algorithm.certificate.test_invariances import ADVANTAGE_NODES, SHAPING_NODES
from tests.helpers import plain_algorithm

UNSCORED = torch.tensor([1, 5])  # one row of a group of three, and one of a group of two
SCORED = torch.tensor([0, 2, 3, 4, 6])


def alone(tensor):
    return tensor


def advantages(node, shaping, batch):
    options = next(iter(shaping.values()), node)  # one of them names a reward term
    algorithm = plain_algorithm(term_weights(options), advantage=node, shaping=shaping)
    rows = batch.clone()
    algorithm.estimate_advantages(rows, alone, Metrics())
    return {name: rows[name] for name in algorithm.advantage.facts.writes}


def compare(node, shaping, reads):
    batch = sample(reads, (), node, on_policy=False)["batch"]
    batch["fields"] = torch.zeros(len(batch))
    holed = batch.clone()
    holed["scores"][UNSCORED] = torch.nan
    if "terms" in holed.keys():
        for values in holed["terms"].values():
            values[UNSCORED] = torch.nan
    found, expected = advantages(node, shaping, holed), advantages(node, shaping, batch[SCORED])
    for name, column in expected.items():
        assert column.isfinite().all()
        torch.testing.assert_close(found[name][SCORED], column, rtol=0, atol=1e-6)
        assert found[name][UNSCORED].eq(0).all()


@pytest.mark.parametrize("name", ADVANTAGE_NODES)
def test_every_advantage_leaves_out_rows_without_a_score(name):
    algorithm = plain_algorithm(term_weights(ADVANTAGE_NODES[name]), advantage=ADVANTAGE_NODES[name])
    compare(ADVANTAGE_NODES[name], {}, algorithm.advantage.facts.reads)


@pytest.mark.parametrize("name", SHAPING_NODES)
def test_every_shaping_leaves_out_rows_without_a_score(name):
    shaping = {name: SHAPING_NODES[name]}
    (plugin,) = plain_algorithm(term_weights(shaping[name]), shaping=shaping).shaping.values()
    compare({"name": "group_norm", "scale": "group"}, shaping, (*plugin.facts.reads, "truncated"))


def batch_with(scores, group):
    keep = torch.ones(len(scores), 3, dtype=torch.bool)
    columns = {"response_mask": keep, "truncated": ~keep[:, 0], "group": torch.tensor(group)}
    columns |= {"scores": torch.tensor(scores), "unit": torch.arange(len(scores))}
    return TensorDict(columns, batch_size=[len(scores)])


@pytest.mark.parametrize(
    ("changes", "trained"),
    [
        ({}, [True, False, True, True, True]),
        ({"mask_tied": True}, [False, False, False, True, True]),  # what is left of group 7 is tied
        ({"pick": "best"}, [True, False, False, False, True]),
        (
            {
                "pick": "best_and_worst",
                "loss": {"name": "dpo", "beta": 0.1, "label_smoothing": 0.0},
                "aggregation": None,
            },
            [False, False, False, True, True],
        ),
    ],
)
def test_rows_without_a_score_do_not_train_and_are_neither_best_nor_worst(changes, trained):
    batch = batch_with([1.0, torch.nan, 1.0, 0.0, 2.0], [7, 7, 7, 3, 3])
    plain_algorithm(**changes).build_loss_mask(batch)
    assert batch["loss_mask"].any(1).tolist() == trained


def test_rows_without_a_score_are_not_drawn():
    batch = batch_with([0.0, torch.nan, 5.0, 0.0], [0, 0, 1, 1])
    algorithm = plain_algorithm(pick={"name": "resample", "power": 1.0})
    algorithm.build_loss_mask(batch)
    drawn = algorithm.select_rows(batch, lambda rows: [rows], seed=0)
    assert drawn["unit"].tolist() == [2, 2, 2], "as many rows as have a score, all of them the only one with a weight"


def test_a_step_without_any_score_trains_nothing_and_does_not_fail():
    batch = batch_with([torch.nan] * 4, [0, 0, 1, 1])
    algorithm = plain_algorithm(advantage={"name": "group_norm", "scale": "batch"})
    algorithm.build_loss_mask(batch)
    algorithm.estimate_advantages(batch, alone, Metrics())
    algorithm.compute_loss_weights(batch, alone)
    assert not batch["loss_mask"].any()
    assert batch["advantages"].eq(0).all() and batch["loss_weights"].eq(0).all()


def test_the_sample_has_the_rows_that_the_tests_name():
    assert sorted([*UNSCORED.tolist(), *SCORED.tolist()]) == list(range(len(KEEP)))
