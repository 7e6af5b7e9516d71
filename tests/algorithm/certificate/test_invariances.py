"""What every registered loss, advantage and aggregation owes: its result depends on no row order, padding, micro-batch
or rank, and ignores what lies outside `loss_mask`. Options are those of the yaml files, so a plugin without one fails
here.
"""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

import rft
from rft.algorithm import ADVANTAGES, AGGREGATIONS, GRADIENT_MASKS, LOSSES, SHAPINGS
from rft.algorithm.certificate.invariances import PERMUTATION
from rft.algorithm.certificate.sample import GROUP, KEEP, MARKS, OF_CANDIDATES, PAIR, PARTS, new_state, of_candidates
from rft.algorithm.divergence import kl_penalty
from rft.algorithm.objective import build_control
from rft.algorithm.token_weights.aggregation import token_mean, unit_weights
from rft.batch.columns import over
from rft.registry import take

CONFIG = Path(rft.__file__).parent / "config" / "algorithm"
F64 = torch.float64


def load(path: Path, keyed: bool) -> dict:
    run = {
        "rollout": {"max_new_tokens": 16},
        "reward": {"accuracy": "right"},
        "algorithm": {"advantage": {"beta": 0.05}},
    }
    whole = OmegaConf.merge(run, {"node": OmegaConf.load(path)})
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


LOSS_NODES = nodes("loss") | nodes("critic_loss") | nodes("prm_loss") | nodes("terms", keyed=True)
ADVANTAGE_NODES = nodes("advantage")
AGGREGATION_NODES = nodes("aggregation")
SHAPING_NODES = nodes("shaping", keyed=True)
MASK_NODES = nodes("gradient_mask")


@pytest.mark.parametrize(
    ("registry", "found"),
    [
        (LOSSES, LOSS_NODES),
        (ADVANTAGES, ADVANTAGE_NODES),
        (AGGREGATIONS, AGGREGATION_NODES),
        (SHAPINGS, SHAPING_NODES),
        (GRADIENT_MASKS, MASK_NODES),
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
        take({k: v for k, v in node.items() if k != "coef"}, kl_penalty, path.stem, "KL")
    assert build_control(node["coef"], "coef").coef >= 0


def alone(tensor):
    return tensor


def random_columns(names, seed) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    columns = {}
    for name in names:
        normal = torch.randn(KEEP.shape, dtype=F64, generator=generator)
        if name in OF_CANDIDATES:
            columns[name] = of_candidates(generator)
        elif "logprobs" in name:
            columns[name] = -normal.abs()
        elif name in MARKS:
            columns[name] = MARKS[name]
        elif name == "terms":
            right = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0], dtype=F64)
            columns[name] = TensorDict({"right": right, "form": normal[:, 0].clone()}, batch_size=[len(KEEP)])
        elif name.endswith("_scores"):
            columns[name] = normal[:, 0].clone()
        elif name == "sum_p_squared":
            columns[name] = normal.sigmoid()
        else:
            columns[name] = normal
    return columns


def random_batch(names, seed=0) -> TensorDict:
    unit = PAIR if "chosen" in names else torch.arange(len(KEEP)) * 3
    rows = {"loss_mask": KEEP, "response_mask": KEEP, "group": GROUP, "unit": unit}
    return TensorDict(rows | random_columns(names, seed), batch_size=[len(KEEP)])


def padded(column):
    return torch.nn.functional.pad(column, (*[0, 0] * (column.dim() - 2), 0, 3)) if column.dim() > 1 else column


def spoilt(column):
    """Nonsense wherever `loss_mask` is False."""
    over_tokens = column.dim() > 1 and column.is_floating_point()
    return torch.where(over(KEEP, column), column, torch.nan) if over_tokens else column


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class LossCase:
    """A loss with its options, random columns, and the weights of the whole batch."""

    def __init__(self, node):
        self.plugin = LOSSES.build(node, "loss")
        self.batch = random_batch(self.plugin.facts.reads)
        self.outputs = random_columns(self.plugin.facts.outputs, seed=1)
        unit = self.plugin.facts.unit
        rows = unit_weights(KEEP.any(1), all_sum=alone)
        self.weights = {"token": token_mean(KEEP, GROUP, all_sum=alone)}.get(unit, rows).to(F64)
        self.splits = PARTS.get(unit, PARTS["row"])

    def prepared(self, rows=slice(None), change=alone, all_sum=alone):
        """Some rows under a change of the columns, with what the plugin prepares of them as a mini-batch."""
        batch = self.batch.apply(change, batch_size=self.batch.batch_size)[rows]
        if self.plugin.facts.prepare is not None:
            outputs = [change(output)[rows] for output in self.outputs.values()]
            for name, column in self.plugin.call("prepare", *outputs, batch, all_sum=all_sum, seed=3).items():
                batch[name] = column
        return batch

    def __call__(self, rows=slice(None), change=alone, batch=None):
        """Weighted sum, gradients of the outputs and summed statistics of some rows, under a change of the columns."""
        batch = self.prepared(rows, change) if batch is None else batch[rows]
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
    whole = loss.prepared()
    parts = [loss(rows, batch=whole) for rows in loss.splits]
    back = torch.cat(loss.splits).argsort()
    same(sum(part[0] for part in parts), total)
    same(tuple(torch.cat(pieces)[back] for pieces in zip(*[part[1] for part in parts], strict=True)), gradients)
    same({name: sum(part[2][name] for part in parts) for name in statistics}, statistics)


def test_what_a_loss_prepares_does_not_depend_on_ranks(loss, over_ranks):
    whole = loss.prepared()
    parts = over_ranks(lambda rows, all_sum: loss.prepared(rows, all_sum=all_sum), loss.splits)
    back = torch.cat(loss.splits).argsort()
    for name in whole.keys():
        if name != "terms":
            same(torch.cat([part[name] for part in parts])[back], whole[name])


def test_a_loss_prepares_without_rows(loss):
    empty = loss.prepared(slice(0, 0))
    assert len(empty) == 0


def test_loss_ignores_what_is_outside_keep(loss):
    total, gradients, statistics = loss()
    found, masked, numbers = loss(change=spoilt)
    same(found, total)
    same(numbers, statistics)
    same(masked, gradients)
    assert all(not gradient[~KEEP].any() for gradient in masked)


def test_loss_of_a_batch_without_trained_tokens_is_zero(loss):
    loss.batch["loss_mask"] = torch.zeros_like(KEEP)
    loss.weights = torch.ones_like(loss.weights)
    total, gradients, statistics = loss()
    assert total == 0
    assert all(not gradient.any() for gradient in gradients)
    assert all(number == 0 for number in statistics.values())


class MaskCase:
    """A gradient mask with its options and random columns."""

    def __init__(self, node):
        self.plugin = GRADIENT_MASKS.build(node, "gradient_mask")
        self.batch = random_batch(self.plugin.facts.reads)
        self.outputs = random_columns(self.plugin.facts.outputs, seed=1)

    def __call__(self, rows=slice(None), change=alone, all_sum=alone):
        batch = self.batch.apply(change, batch_size=self.batch.batch_size)[rows]
        outputs = [change(output)[rows] for output in self.outputs.values()]
        return self.plugin(*outputs, batch, all_sum=all_sum, seed=3)


@pytest.mark.parametrize("name", sorted(MASK_NODES))
def test_gradient_mask_depends_on_no_order_padding_rank_or_what_is_outside_keep(name, over_ranks):
    mask = MaskCase(MASK_NODES[name])
    whole = mask()
    assert whole.dtype == torch.bool and whole.any() and not (whole & ~KEEP).any() and (KEEP & ~whole).any()
    assert torch.equal(mask(rows=PERMUTATION), whole[PERMUTATION])
    assert torch.equal(mask(change=padded), padded(whole))
    assert torch.equal(mask(change=spoilt), whole)
    parts = over_ranks(lambda rows, all_sum: mask(rows, all_sum=all_sum), PARTS["row"])
    assert torch.equal(torch.cat(parts), whole)
    mask.batch["loss_mask"] = torch.zeros_like(KEEP)
    assert not mask().any()


class AdvantageCase:
    """An advantage with its options, random columns, scores with a tied group, and rewards that end in the scores."""

    def __init__(self, node):
        self.plugin = ADVANTAGES.build(node, "advantage")
        self.batch = random_batch(self.plugin.facts.reads)
        self.scores = torch.tensor([1.0, 0.0, 0.5, 0.3, -2.0, 4.0, 0.3], dtype=F64)
        self.rewards = random_columns(["rewards"], seed=2)["rewards"]

    def __call__(self, rows=slice(None), change=alone, all_sum=alone):
        batch = self.batch.apply(change, batch_size=self.batch.batch_size)[rows]
        supplied = {"all_sum": all_sum, "term_weights": {"right": 1.0, "form": 0.5}, "state": new_state(self.plugin)}
        return self.plugin(self.scores[rows], change(self.rewards)[rows], batch, **supplied)


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


def test_advantage_does_not_depend_on_ranks(advantage, over_ranks):
    first, second = torch.tensor([0, 1, 2, 3, 6]), torch.tensor([4, 5])  # groups stay whole
    parts = over_ranks(lambda rows, all_sum: advantage(rows, all_sum=all_sum), (first, second))
    back = torch.cat([first, second]).argsort()
    expected = advantage()
    same({name: torch.cat([part[name] for part in parts])[back] for name in expected}, expected)


def test_advantage_of_no_rows_is_empty(advantage, over_ranks):
    rows = torch.arange(len(KEEP))
    none, every = over_ranks(lambda part, all_sum: advantage(part, all_sum=all_sum), (rows[:0], rows))
    assert all(column.shape == (0, KEEP.shape[1]) for column in none.values())
    same(every, advantage())


def test_advantage_without_trained_tokens_is_zero(advantage):
    advantage.batch["loss_mask"] = torch.zeros_like(KEEP)
    assert all(not column.any() for column in advantage().values())


def test_advantage_keeps_float32(advantage):
    advantage.batch = advantage.batch.apply(lambda column: column.float() if column.dtype == F64 else column)
    advantage.scores, advantage.rewards = advantage.scores.float(), advantage.rewards.float()
    assert {column.dtype for column in advantage().values()} == {torch.float32}


@pytest.mark.parametrize("name", sorted(AGGREGATION_NODES))
def test_aggregation_does_not_depend_on_ranks(name, over_ranks):
    compute_loss_weights = AGGREGATIONS.build(AGGREGATION_NODES[name], "aggregation")
    first, second = torch.tensor([0, 1, 2, 3, 6]), torch.tensor([4, 5])
    parts = over_ranks(
        lambda rows, all_sum: compute_loss_weights(KEEP[rows], GROUP[rows], rows=KEEP[rows].any(1), all_sum=all_sum),
        (first, second),
    )
    back = torch.cat([first, second]).argsort()
    assert torch.equal(torch.cat(parts)[back], compute_loss_weights(KEEP, GROUP, rows=KEEP.any(1), all_sum=alone))
