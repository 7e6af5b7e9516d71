"""Ranks without processes."""

import pytest


@pytest.fixture
def over_ranks(ranks):
    """`over_ranks(function, parts)`: function(part, all_sum) on a rank for every part; what each of them returned."""

    def run(function, parts):
        return ranks(len(parts), lambda world: function(parts[world.rank], world.all_sum))

    return run
