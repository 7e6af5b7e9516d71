"""The sum of a loss and its terms: weights, coefficients, shares and statistics by hand."""

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm import GRADIENT_MASKS, LOSSES
from rft.algorithm.objective import Control, Objective, Term
from rft.registry import Registry

F64 = torch.float64
PLUGINS = Registry("loss", functions=LOSSES.functions, **LOSSES.facts)
MASKS = Registry("gradient mask", supplied=GRADIENT_MASKS.supplied, **GRADIENT_MASKS.facts)


@PLUGINS.register("tokens", reads=("advantages",))
def tokens(logprobs, batch):
    return -batch["advantages"] * logprobs, {"seen": logprobs.detach()}


@PLUGINS.register("rows", reads=("advantages", "scores"), outputs=("entropy", "logprobs"), unit="sequence")
def rows(entropy, logprobs, batch):
    return batch["scores"] * entropy.sum(1), {"entropy_sum": entropy.detach().sum(1)}


def share_of_total(entropy, batch, *, all_sum, seed, power):
    return {"share": (entropy / all_sum(entropy.sum())) ** power + seed}


@PLUGINS.register("shares", outputs=("entropy",), prepare=share_of_total)
def shares_of_all(entropy, batch, *, power: int):
    return batch["share"] * entropy, {}


@MASKS.register("beyond", reads=("advantages",))
def beyond(logprobs, batch, *, all_sum, seed, bound: float):
    return logprobs < bound


@PLUGINS.register("means", reads=("scores",), unit="sequence", geometric_mean=True)
def means(logprobs, batch):
    return -batch["scores"] * logprobs.mean(1).exp(), {}


def term(name, coef=1.0, called=None):
    return Term(called or name, PLUGINS.build({"name": name}, "loss"), Control(coef))


def case():
    batch = TensorDict(
        {
            "advantages": torch.tensor([[0.0, 2.0, 3.0], [0.0, 5.0, 7.0]], dtype=F64),
            "scores": torch.tensor([10.0, 20.0], dtype=F64),
            "loss_weights": torch.tensor([[0.0, 0.5, 0.25], [0.0, 0.25, 0.0]], dtype=F64),
            "unit_weights": torch.tensor([0.5, 0.25], dtype=F64),
        },
        batch_size=[2],
    )
    outputs = {
        "logprobs": torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -4.0]], dtype=F64, requires_grad=True),
        "entropy": torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 4.0]], dtype=F64, requires_grad=True),
    }
    return outputs, batch


def test_outputs_and_reads_are_those_of_all_terms_once():
    objective = Objective([term("tokens"), term("rows")])
    assert objective.outputs == ("logprobs", "entropy")
    assert objective.reads == ("advantages", "scores")
    assert Objective([term("rows"), term("tokens")]).outputs == ("entropy", "logprobs")


def test_total_gradient_shares_and_statistics_by_hand():
    outputs, batch = case()
    total, shares, statistics = Objective([term("tokens"), term("rows", 0.1, "mine")])(outputs, batch, None)
    # tokens: 0.5 * 2 * 1 + 0.25 * 3 * 2 + 0.25 * 5 * 3 = 6.25; rows: 0.5 * 10 * 3 + 0.25 * 20 * 7 = 50
    assert float(total.detach()) == pytest.approx(6.25 + 0.1 * 50)
    assert {name: float(share) for name, share in shares.items()} == {"loss/tokens": 6.25, "loss/mine": 50.0}
    assert not any(share.requires_grad for share in shares.values())
    logprobs, entropy = torch.autograd.grad(total, [outputs["logprobs"], outputs["entropy"]])
    torch.testing.assert_close(logprobs, torch.tensor([[0, -1, -0.75], [0, -1.25, 0]], dtype=F64))
    torch.testing.assert_close(entropy, torch.tensor([[0.5] * 3, [0.5] * 3], dtype=F64))
    assert statistics["seen"].tolist() == outputs["logprobs"].tolist()
    assert statistics["entropy_sum"].tolist() == [3.0, 7.0]


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        (
            "tokens",
            (),
            r"^the loss 'tokens' returned a value of shape \[\]; with unit='token' it must return \[2, 3\]",
        ),
        ("tokens", (2,), r"shape \[2\]; with unit='token' it must .*: one number per token, not reduced$"),
        ("tokens", (2, 1), r"shape \[2, 1\]; with unit='token'"),
        (
            "rows",
            (),
            r"^the loss 'rows' returned a value of shape \[\]; with unit='sequence' it must return \[2\]",
        ),
        (
            "rows",
            (2, 3),
            r"shape \[2, 3\]; with unit='sequence' it must .*: one number per row, not reduced$",
        ),
    ],
)
def test_a_value_of_another_shape_is_refused_and_not_broadcast(name, shape, said, monkeypatch):
    wrong = term(name)
    monkeypatch.setattr(wrong.plugin, "function", lambda *_: (torch.ones(shape, dtype=F64), {}))
    with pytest.raises(ValueError, match=said):
        Objective([wrong])(*case(), None)


def test_a_coefficient_is_asked_every_time():
    outputs, batch = case()
    objective = Objective([term("tokens", 1.0)])
    once, shares, _ = objective(outputs, batch, None)
    objective.terms[0].coef.coef = 3.0
    thrice, same, _ = objective(outputs, batch, None)
    assert float((thrice / once).detach()) == 3.0
    assert same == shares, "what is logged is without the coefficient"


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf")])
def test_what_weighs_nothing_may_be_nonsense(nonsense):
    outputs, batch = case()
    batch["advantages"][1, 2] = nonsense
    total, _, _ = Objective([term("tokens")])(outputs, batch, None)
    assert float(total.detach()) == pytest.approx(6.25)
    batch["advantages"][1, 1] = nonsense
    total, _, _ = Objective([term("tokens")])(outputs, batch, None)
    assert not total.isfinite()


def test_a_batch_that_weighs_nothing_has_a_zero_gradient_and_still_a_graph():
    outputs, batch = case()
    for name in ("loss_weights", "unit_weights"):
        batch[name] = torch.zeros_like(batch[name])
    total, shares, _ = Objective([term("tokens"), term("rows")])(outputs, batch, None)
    total.backward()
    assert float(total.detach()) == 0.0 and not any(shares.values())
    assert not outputs["logprobs"].grad.any()


def test_what_a_plugin_prepares_is_a_column_of_the_batch():
    (outputs, batch), node = case(), {"name": "shares", "power": 2}
    objective = Objective([Term("shares", PLUGINS.build(node, "loss"), Control(1.0))])
    assert objective.prepares == objective.outputs == ("entropy",)
    objective.prepare(outputs, batch, all_sum=lambda tensor: 2 * tensor, seed=7)
    assert batch["share"].tolist() == [[7.0, 7.0025, 7.01], [7.0, 7.0225, 7.04]]
    total, _, _ = objective(outputs, batch, None)
    assert float(total.detach()) == pytest.approx(0.5 * 7.0025 + 0.25 * 7.01 * 2 + 0.25 * 7.0225 * 3)


def test_a_mask_stops_the_gradient_of_the_loss_alone():
    outputs, batch = case()
    mask = MASKS.build({"name": "beyond", "bound": -1.5}, "mask")
    objective = Objective([term("tokens"), term("rows")], mask)
    assert objective.prepares == ("logprobs",) and objective.reads == ("advantages", "scores")
    objective.prepare(outputs, batch, all_sum=lambda tensor: tensor, seed=0)
    total, shares, _ = objective(outputs, batch, None)
    assert shares["loss/tokens"] == 6.25, "the value and the weights stay"
    logprobs, entropy = torch.autograd.grad(total, [outputs["logprobs"], outputs["entropy"]])
    assert logprobs.tolist() == [[0.0, 0.0, -0.75], [0.0, -1.25, 0.0]]
    assert entropy.tolist() == [[5.0] * 3] * 2


def test_correction_weighs_the_loss_and_not_the_terms():
    outputs, batch = case()
    batch["correction_weights"] = torch.tensor([[0.0, 2.0, 0.0], [0.0, 1.0, 1.0]], dtype=F64)
    objective = Objective([term("tokens"), term("tokens", 0.1, "again")], corrected=True)
    total, shares, _ = objective(outputs, batch, None)
    assert {name: float(share) for name, share in shares.items()} == {"loss/tokens": 5.75, "loss/again": 6.25}
    assert float(total.detach()) == pytest.approx(5.75 + 0.625)
    assert objective.spoilt_rows(outputs, batch) == {}


def test_correction_weighs_a_row_with_the_geometric_mean_of_its_weights():
    outputs, batch = case()
    batch["loss_mask"] = torch.tensor([[False, True, True], [False, True, True]])
    batch["correction_weights"] = torch.tensor([[0.0, 2.0, 8.0], [0.0, 3.0, 0.0]], dtype=F64)
    plain, _, _ = Objective([term("means")]).evaluate(means_term := term("means"), outputs, batch)
    objective = Objective([means_term], corrected=True)
    _, weights, _ = objective.evaluate(means_term, outputs, batch)
    assert torch.equal(weights, batch["unit_weights"] * torch.tensor([4.0, 0.0], dtype=F64))
    assert float(objective(outputs, batch, None)[0].detach()) == float((plain * weights).sum().detach())


OF_ROWS = [
    {"name": "dpo", "beta": 0.3, "label_smoothing": 0.1},
    {"name": "ipo", "beta": 0.3, "average": True},
    {"name": "ipo", "beta": 0.3, "average": False},
    {"name": "cpo", "beta": 0.3},
    {"name": "simpo", "beta": 0.3, "gamma": 0.5},
    {"name": "orpo", "weight": 0.3},
    {"name": "chosen_nll"},
    {"name": "kto", "beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 2.0},
]


@pytest.mark.parametrize("node", OF_ROWS, ids=lambda node: node["name"])
def test_a_token_of_weight_two_is_in_a_loss_of_rows_as_two_tokens(node):
    logprobs = torch.tensor([[0, -0.5, -1.25], [0, -0.75, -0.25]], dtype=F64)
    columns = {"ref_logprobs": torch.tensor([[0, -1, -0.5], [0, -1, -2]], dtype=F64)}
    columns["loss_mask"] = torch.tensor([[False, True, True], [False, True, False]])
    rows = {"unit": torch.zeros(2, dtype=torch.int64), "chosen": torch.tensor([True, False])}
    rows |= {"label": rows["chosen"], "mismatched": torch.tensor([False, False]), "unit_weights": torch.full((2,), 0.5)}
    weighted = TensorDict(rows | columns | {"token_weights": torch.tensor([[1, 2, 1], [1, 2, 1]])}, batch_size=2)
    twice = [0, 1, 1, 2]  # each second token stands there twice
    doubled = TensorDict(rows | {name: column[:, twice] for name, column in columns.items()}, batch_size=2)
    part, found = Term("loss", LOSSES.build(node, "loss"), Control(1.0)), []
    for batch, places in ((weighted, [0, 1, 2]), (doubled, twice)):
        leaf, objective = logprobs.clone().requires_grad_(), Objective([part])
        outputs = {"logprobs": leaf[:, places]}
        objective.prepare({"logprobs": outputs["logprobs"].detach()}, batch, lambda total: total, 0)
        total, _, statistics = objective(outputs, batch, None)
        found.append([total, torch.autograd.grad(total, leaf)[0], *statistics.values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.equal(weighted["ref_logprobs"], columns["ref_logprobs"]), "the batch keeps its columns"
