"""What every registered shaping owes: its result depends on no row order, padding or rank.

Options are those of the yaml files; lengths are in the range of the rows.
"""

import pytest
import torch

from rft.algorithm import SHAPINGS
from rft.algorithm.certificate.invariances import PERMUTATION
from rft.algorithm.certificate.sample import GROUP, KEEP, TURN
from tests.algorithm.certificate.test_invariances import SHAPING_NODES, alone, padded, random_batch, same

F64 = torch.float64
FIRST, SECOND = torch.tensor([0, 1, 2, 3, 6]), torch.tensor([4, 5])  # groups stay whole


class ShapingCase:
    """A shaping with its options, random columns, scores with a tied group, and a step before this one."""

    def __init__(self, node, turns):
        node = node | {"max_tokens": 2 if turns else 6} if "max_tokens" in node else node
        self.plugin = SHAPINGS.build(node, "shaping")
        self.batch = random_batch(self.plugin.facts.reads)
        if turns:
            self.batch["turn"] = TURN
        self.batch["truncated"] = torch.arange(len(KEEP)) % 3 == 0
        self.scores = torch.tensor([1.0, 0.0, 0.5, 0.3, -20.0, 4.0, 0.3], dtype=F64)

    def __call__(self, rows=slice(None), change=alone, all_sum=alone):
        batch = self.batch.apply(change, batch_size=self.batch.batch_size)[rows]
        supplied = {"all_sum": all_sum}
        if self.plugin.facts.state is not None:
            supplied["state"] = self.plugin.facts.state()
            self.plugin(2 * self.scores[rows] - 1, batch, **supplied)
        return self.plugin(self.scores[rows], batch, **supplied)


CASES = [(name, turns) for name, node in sorted(SHAPING_NODES.items()) for turns in {False, "of" in node}]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}{' of turns' * case[1]}")
def shaping(request):
    name, turns = request.param
    return ShapingCase(SHAPING_NODES[name], turns)


def test_shaping_changes_some_score(shaping):
    found = shaping()
    assert found.shape == shaping.scores.shape and found.isfinite().all()
    assert found.ne(shaping.scores).any()


def test_shaping_ignores_row_order(shaping):
    same(shaping(rows=PERMUTATION), shaping()[PERMUTATION])


def test_shaping_ignores_padding(shaping):
    same(shaping(change=padded), shaping())


def test_shaping_does_not_depend_on_ranks(shaping, over_ranks):
    parts = over_ranks(lambda rows, all_sum: shaping(rows, all_sum=all_sum), (FIRST, SECOND))
    same(torch.cat(parts)[torch.cat([FIRST, SECOND]).argsort()], shaping())


def test_shaping_of_no_rows_is_empty(shaping, over_ranks):
    rows = torch.arange(len(KEEP))
    none, every = over_ranks(lambda part, all_sum: shaping(part, all_sum=all_sum), (rows[:0], rows))
    assert none.shape == (0,)
    same(every, shaping())


def test_shaping_of_a_step_without_rows_is_empty(shaping):
    assert shaping(rows=slice(0, 0)).shape == (0,)


def test_shaping_keeps_float32(shaping):
    shaping.scores = shaping.scores.float()
    assert shaping().dtype == torch.float32


def test_groups_stay_whole():
    assert not set(GROUP[FIRST].tolist()) & set(GROUP[SECOND].tolist())
