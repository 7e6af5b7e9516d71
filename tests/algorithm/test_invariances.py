"""What every registered loss, advantage and aggregation owes: its result depends on no row order, padding, micro-batch
or rank, and ignores what lies outside `keep`. Options are those of the yaml files, so a plugin without one fails here.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

import rft
from rft.algorithm import ADVANTAGES, AGGREGATIONS, LOSSES, SHAPINGS
from rft.algorithm.aggregation import token_mean, unit_weights
from rft.algorithm.kl import build_control, kl_penalty
from rft.registry import consume

CONFIG = Path(rft.__file__).parent / "config" / "algorithm"
F64 = torch.float64
KEEP = torch.tensor(
    [
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 1, 0, 0, 1, 1, 1, 1],  # a gap
        [0, 0, 0, 0, 0, 0, 0, 0],  # nothing trained
        [0, 1, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 1, 0],
    ],
    dtype=torch.bool,
)
GROUP = torch.tensor([4, 4, 4, 1, 6, 6, 1])
PERMUTATION = torch.tensor([6, 2, 4, 0, 5, 1, 3])


def load(path: Path, keyed: bool) -> dict:
    whole = OmegaConf.merge({"rollout": {"max_new_tokens": 16}}, {"node": OmegaConf.load(path)})
    node = OmegaConf.to_container(whole, resolve=True)["node"]
    return next(iter(node.values())) if keyed else node


def nodes(folder: str, keyed: bool = False) -> dict[str, dict]:
    """The node of every yaml of a folder, by file name; `coef` is taken off, as the trainer does."""
    found = {}
    for path in sorted((CONFIG / folder).glob("*.yaml")):
        if path.stem == "none":
            continue
        node = load(path, keyed)
        found[path.stem] = {name: option for name, option in node.items() if name != "coef"}
    return found


LOSS_NODES = nodes("loss") | nodes("critic_loss") | nodes("terms", keyed=True)
ADVANTAGE_NODES = nodes("advantage")
AGGREGATION_NODES = nodes("aggregation")
SHAPING_NODES = nodes("shaping", keyed=True)


@pytest.mark.parametrize(
    ("registry", "found"),
    [
        (LOSSES, LOSS_NODES),
        (ADVANTAGES, ADVANTAGE_NODES),
        (AGGREGATIONS, AGGREGATION_NODES),
        (SHAPINGS, SHAPING_NODES),
    ],
    ids=lambda value: value.kind if isinstance(value, type(LOSSES)) else "",
)
def test_every_plugin_has_a_yaml_of_its_name(registry, found):
    ours = [name for name in registry.names() if registry.function(name).__module__.startswith("rft.")]
    assert set(ours) <= set(found)
    assert all(found[name]["name"] == name for name in ours)
    for name, node in found.items():
        registry.build(node, name)


@pytest.mark.parametrize("path", sorted(CONFIG.glob("terms/*.yaml")) + sorted(CONFIG.glob("reward_kl/kl*.yaml")))
def test_every_coefficient_is_a_number_or_a_control(path):
    node = load(path, keyed=path.parent.name == "terms")
    if path.parent.name == "reward_kl":
        consume({k: v for k, v in node.items() if k != "coef"}, kl_penalty, path.stem, "KL")
    assert build_control(node["coef"], "coef").coef > 0


def alone(tensor):
    return tensor


def on_ranks(*parts: Callable) -> list:
    """Runs one function a rank in lockstep; each is given an `all_sum` over them."""
    meeting, shares, results = threading.Barrier(len(parts), timeout=20), [None] * len(parts), [None] * len(parts)

    def run(rank):
        def all_sum(tensor):
            shares[rank] = tensor
            meeting.wait()
            total = sum(shares)
            meeting.wait()
            return total

        results[rank] = parts[rank](all_sum)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def random_columns(names, seed) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    columns = {}
    for name in names:
        normal = torch.randn(KEEP.shape, dtype=F64, generator=generator)
        columns[name] = -normal.abs() if "logprobs" in name else normal
    return columns


def batch_of(names, seed=0) -> TensorDict:
    return TensorDict({"keep": KEEP, "group": GROUP, **random_columns(names, seed)}, batch_size=[len(KEEP)])


def padded(column):
    return torch.nn.functional.pad(column, (0, 3)) if column.dim() == 2 else column


def spoilt(column):
    """Nonsense wherever `keep` is False."""
    return torch.where(KEEP, column, torch.nan) if column.dim() == 2 and column.is_floating_point() else column


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class LossCase:
    """A loss with its options, random columns, and the weights of the whole batch."""

    def __init__(self, node):
        self.plugin = LOSSES.build(node, "loss")
        self.batch = batch_of(self.plugin.facts.reads)
        self.outputs = random_columns(self.plugin.facts.outputs, seed=1)
        weights = {"token": token_mean(KEEP, GROUP, all_sum=alone), "sequence": unit_weights(KEEP, all_sum=alone)}
        self.weights = weights[self.plugin.facts.unit].to(F64)

    def __call__(self, rows=slice(None), change=alone):
        """Weighted sum, gradients of the outputs and summed statistics of some rows, under a change of the columns."""
        batch = self.batch.apply(change, batch_size=self.batch.batch_size)[rows]
        leaves = [change(output)[rows].clone().requires_grad_() for output in self.outputs.values()]
        loss, statistics = self.plugin(*leaves, batch)
        weights = change(self.weights)[rows].nan_to_num()
        assert loss.shape == weights.shape
        assert all(number.shape == weights.shape and not number.requires_grad for number in statistics.values())
        total = (weights * loss).sum()
        gradients = torch.autograd.grad(total, leaves)
        return total.detach(), gradients, {name: number.sum() for name, number in statistics.items()}


@pytest.fixture(params=sorted(LOSS_NODES))
def loss(request):
    return LossCase(LOSS_NODES[request.param])


def test_loss_ignores_row_order(loss):
    total, gradients, statistics = loss()
    found, moved, numbers = loss(rows=PERMUTATION)
    same(found, total)
    same(numbers, statistics)
    same(moved, tuple(gradient[PERMUTATION] for gradient in gradients))


def test_loss_ignores_padding(loss):
    total, gradients, statistics = loss()
    found, wide, numbers = loss(change=padded)
    same(found, total)
    same(numbers, statistics)
    same(wide, tuple(padded(gradient) for gradient in gradients))


def test_loss_is_the_sum_over_micro_batches(loss):
    total, gradients, statistics = loss()
    parts = [loss(rows=slice(0, 3)), loss(rows=slice(3, 4)), loss(rows=slice(4, 7))]
    same(sum(part[0] for part in parts), total)
    same(tuple(torch.cat(pieces) for pieces in zip(*[part[1] for part in parts], strict=True)), gradients)
    same({name: sum(part[2][name] for part in parts) for name in statistics}, statistics)


def test_loss_ignores_what_is_outside_keep(loss):
    total, gradients, statistics = loss()
    found, masked, numbers = loss(change=spoilt)
    same(found, total)
    same(numbers, statistics)
    same(masked, gradients)
    assert all(not gradient[~KEEP].any() for gradient in masked)


def test_loss_of_a_batch_without_trained_tokens_is_zero(loss):
    loss.batch["keep"] = torch.zeros_like(KEEP)
    loss.weights = torch.ones_like(loss.weights)
    total, gradients, statistics = loss()
    assert total == 0
    assert all(not gradient.any() for gradient in gradients)
    assert all(number == 0 for number in statistics.values())


class AdvantageCase:
    """An advantage with its options, random columns, scores with a tied group, and rewards that end in the scores."""

    def __init__(self, node):
        self.plugin = ADVANTAGES.build(node, "advantage")
        self.batch = batch_of(self.plugin.facts.reads)
        self.scores = torch.tensor([1.0, 0.0, 0.5, 0.3, -2.0, 4.0, 0.3], dtype=F64)
        self.rewards = random_columns(["rewards"], seed=2)["rewards"]

    def __call__(self, rows=slice(None), change=alone, all_sum=alone):
        batch = self.batch.apply(change, batch_size=self.batch.batch_size)[rows]
        return self.plugin(self.scores[rows], change(self.rewards)[rows], batch, all_sum=all_sum)


@pytest.fixture(params=sorted(ADVANTAGE_NODES))
def advantage(request):
    return AdvantageCase(ADVANTAGE_NODES[request.param])


def test_advantage_writes_what_it_says_and_nothing_outside_keep(advantage):
    columns = advantage()
    assert tuple(columns) == advantage.plugin.facts.writes
    for column in columns.values():
        assert column.shape == KEEP.shape
        assert not column[~KEEP].any()
        assert column[KEEP].any()


def test_advantage_ignores_row_order(advantage):
    same(advantage(rows=PERMUTATION), {name: column[PERMUTATION] for name, column in advantage().items()})


def test_advantage_ignores_padding(advantage):
    same(advantage(change=padded), {name: padded(column) for name, column in advantage().items()})


def test_advantage_ignores_what_is_outside_keep(advantage):
    same(advantage(change=spoilt), advantage())


def test_advantage_does_not_depend_on_ranks(advantage):
    first, second = torch.tensor([0, 1, 2, 3, 6]), torch.tensor([4, 5])  # groups stay whole
    parts = on_ranks(*[lambda all_sum, rows=rows: advantage(rows=rows, all_sum=all_sum) for rows in (first, second)])
    back = torch.cat([first, second]).argsort()
    expected = advantage()
    same({name: torch.cat([part[name] for part in parts])[back] for name in expected}, expected)


def test_advantage_without_trained_tokens_is_zero(advantage):
    advantage.batch["keep"] = torch.zeros_like(KEEP)
    assert all(not column.any() for column in advantage().values())


def test_advantage_keeps_float32(advantage):
    advantage.batch = advantage.batch.apply(lambda column: column.float() if column.dtype == F64 else column)
    advantage.scores, advantage.rewards = advantage.scores.float(), advantage.rewards.float()
    assert {column.dtype for column in advantage().values()} == {torch.float32}


@pytest.mark.parametrize("name", sorted(AGGREGATION_NODES))
def test_aggregation_does_not_depend_on_ranks(name):
    weigh = AGGREGATIONS.build(AGGREGATION_NODES[name], "aggregation")
    first, second = torch.tensor([0, 1, 2, 3, 6]), torch.tensor([4, 5])
    parts = on_ranks(
        *[lambda all_sum, rows=rows: weigh(KEEP[rows], GROUP[rows], all_sum=all_sum) for rows in (first, second)]
    )
    back = torch.cat([first, second]).argsort()
    assert torch.equal(torch.cat(parts)[back], weigh(KEEP, GROUP, all_sum=alone))
