"""Group statistics and the filter that reads them."""

import torch

from rft.algorithm.scores.groups import dense_numbers, group_statistics, informative_groups


def test_statistics_by_hand():
    scores = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.0, 0.0], dtype=torch.float64)
    group = torch.tensor([7, 3, 7, 3, 7, 7])
    found = group_statistics(scores, group)
    assert found.size.tolist() == [4, 2, 4, 2, 4, 4]
    assert found.mean.tolist() == [0.25, 3.0, 0.25, 3.0, 0.25, 0.25]
    torch.testing.assert_close(found.std, torch.tensor([0.5, 2**0.5, 0.5, 2**0.5, 0.5, 0.5], dtype=torch.float64))
    assert not found.tied.any()


def test_a_group_of_one_is_tied_and_has_no_spread():
    found = group_statistics(torch.tensor([5.0]), torch.tensor([0]))
    assert found.std.tolist() == [0.0]
    assert found.tied.tolist() == [True]


def test_informative_groups_ignore_rounding_but_not_small_differences():
    scores = torch.tensor([0.3, 0.1 + 0.2, 1e6, 1e6 + 1, -2.0, -2.0, 0.0, 1e-9])
    scores[1] = scores[0].nextafter(torch.tensor(1.0))
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert informative_groups(scores, group).tolist() == [False, False, True, True, False, False, True, True]


def test_dense_numbers_are_those_of_unique():
    for ids in (torch.tensor([7, 3, 7, -1, 3, 9]), torch.tensor([4]), torch.tensor([], dtype=torch.int64)):
        assert dense_numbers(ids).equal(torch.unique(ids, return_inverse=True)[1])
