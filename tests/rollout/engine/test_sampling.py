import math

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rft.rollout.engine import sampling as module
from rft.rollout.engine.sampling import greedy, invert, sample, stream, sum_by_doubling, truncate, uniform

GOLDEN = 0x9E3779B97F4A7C15


def test_seeds_of_64_bits_are_all_taken():
    streams = stream([0, 1, 2**63, 2**64 - 1, -5])
    assert len(set(streams.tolist())) == 5
    assert stream([2**64 - 5]).tolist() == streams[4:].tolist()


def test_uniform_is_uniform_over_seeds_and_over_positions():
    over_seeds = uniform(stream(list(range(20000))), 3)
    one = stream([11])
    over_positions = torch.cat([uniform(one, position) for position in range(5000)])
    for draws in (over_seeds, over_positions):
        assert draws.dtype == torch.float64 and draws.min() >= 0 and draws.max() < 1
        counts = torch.histc(draws, bins=50, min=0, max=1)
        expected = len(draws) / 50
        assert ((counts - expected) ** 2 / expected).sum() < 85.4  # chi-square, 49 degrees of freedom, p = 0.001
        neighbours = torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1]
        assert abs(neighbours) < 4 / math.sqrt(len(draws))


def test_no_stream_is_another_one_shifted():
    assert uniform(stream([0]), 1) != uniform(stream([GOLDEN]), 0)


def test_invert_by_hand():
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0]]).repeat(6, 1)
    draws = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = invert(weights, draws)
    assert tokens.tolist() == [1, 1, 3, 3, 4, 4]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 2 + [math.log(0.25)] * 4)


@pytest.mark.parametrize("width", [1, 2, 7, 64, 390])
def test_sums_by_doubling_are_the_running_sums(width, monkeypatch):
    values = torch.rand(3, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    torch.testing.assert_close(sum_by_doubling(values), values.cumsum(-1), rtol=1e-14, atol=0)
    draws = torch.rand(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, _ = invert(values, draws)
    monkeypatch.setattr(module, "running_sum", sum_by_doubling)
    assert torch.equal(invert(values, draws)[0], tokens)


def test_invert_stays_inside_where_rounding_lifts_the_sum():
    weights = torch.tensor([[1.0, 1.5 * 2**-24]])
    assert weights.sum() > weights.double().sum()
    tokens, logprobs = invert(weights, torch.tensor([1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == pytest.approx([math.log(1.5 * 2**-24)])


@pytest.mark.parametrize("width", [1, 2, 7, 64, 1000, 4097])
def test_invert_agrees_with_a_plain_search_of_the_distribution_function(width):
    generator = torch.Generator().manual_seed(width)
    weights = torch.rand(200, width, generator=generator) * (torch.rand(200, width, generator=generator) < 0.3)
    weights[:, -1] += 0.01
    draws = torch.rand(200, generator=generator, dtype=torch.float64)
    tokens, logprobs = invert(weights, draws)
    sums = weights.double().cumsum(-1)
    expected = torch.searchsorted(sums, (draws * sums[:, -1])[:, None], right=True).squeeze(1)
    assert torch.equal(tokens, expected)
    shares = weights.double().gather(1, tokens[:, None]).squeeze(1) / sums[:, -1]
    torch.testing.assert_close(logprobs.double(), shares.log(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.3, 5, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (0.9, 6, 0.9, 0.1),
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_transformers_warpers(temperature, top_k, top_p, min_p):
    rows = 20000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3))
    warped = TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    if min_p:
        warped = MinPLogitsWarper(min_p)(None, warped)
    expected = warped[0].double().softmax(-1)
    assert temperature != 0.9 or 1 < (expected > 0).sum() < 6, "the case is to need each of the three"

    draws = uniform(stream(list(range(rows))), 0)
    tokens, logprobs = sample(logits.repeat(rows, 1), draws, temperature, top_k, top_p, min_p)
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], rtol=0, atol=1e-5)
    counts = tokens.bincount(minlength=12)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - rows * expected[kept]) ** 2 / (rows * expected[kept])).sum()
    assert chi_square < 31.3  # 11 degrees of freedom, p = 0.001


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_top_p_over_a_large_vocabulary_keeps_what_a_full_sort_keeps(scale):
    weights = torch.softmax(scale * torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)), -1)
    kept = truncate(weights, 0, 0.9, 0.0) > 0
    warped = TopPLogitsWarper(0.9)(None, weights.log())
    assert torch.equal(kept, warped > -math.inf)


def test_ties_at_the_edge_are_kept():
    weights = torch.tensor([[0.4, 0.2, 0.2, 0.2]])
    assert (truncate(weights, 2, 1.0, 0.0) > 0).all()


def test_top_p_of_nothing_keeps_the_best():
    weights = torch.tensor([[0.1, 0.6, 0.3]])
    assert (truncate(weights, 0, 0.0, 0.0) > 0).tolist() == [[False, True, False]]


def test_greedy_scores_with_the_plain_softmax():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    tokens, logprobs = greedy(logits)
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == pytest.approx([math.log(0.75)])


def test_a_draw_does_not_see_other_rows():
    logits = torch.randn(9, 500, generator=torch.Generator().manual_seed(1))
    draws = uniform(stream(list(range(9))), 7)
    together = sample(logits.clone(), draws, 1.0, 0, 0.9, 0.0)
    for row in range(9):
        alone = sample(logits[row : row + 1], draws[row : row + 1], 1.0, 0, 0.9, 0.0)
        assert alone[0] == together[0][row]
