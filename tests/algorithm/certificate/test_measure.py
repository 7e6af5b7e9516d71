"""The prover of gradients: what it enumerates, that it finds what is known of some plugins, and that it can fail."""

import pytest
import torch

from rft.algorithm import ADVANTAGES, AGGREGATIONS, LOSSES, Gradient
from rft.algorithm.certificate import certificate
from rft.algorithm.certificate.invariances import CHECKS, LOSS_CHECKS, invariances
from rft.algorithm.certificate.measure import OBJECTIVES, compare, expected_gradient, measure, objective_gradient
from rft.algorithm.certificate.policy import Prompt, TinyPolicy
from rft.algorithm.divergence import log_ratio
from rft.registry import Registry

REGISTRIES = {"advantage": ADVANTAGES, "loss": LOSSES, "aggregation": AGGREGATIONS}
ONE = (Prompt(positions=2),)
EQUAL = (Prompt(positions=2, ends=False),)


def of(facts=None, kind="loss"):
    """Decorator: a plugin from a bare function, in a registry of its own."""

    def build(function):
        registry = REGISTRIES[kind]
        own = Registry(kind, supplied=registry.supplied, functions=registry.functions, **registry.facts)
        reads = {} if kind == "aggregation" else {"reads": ("old_logprobs", "advantages")}
        own.register(function.__name__, **{"gradient": Gradient("exact"), **reads, **(facts or {})})(function)
        return own.build({"name": function.__name__}, "mine")

    return build


def reinforce(logprobs, batch):
    return torch.where(batch["loss_mask"], -batch["advantages"] * logprobs, 0.0), {}


def test_the_policy_is_enumerated_whole():
    policy = TinyPolicy()
    chances = policy.probabilities(policy.logits)
    assert [int((policy.prompt == p).sum()) for p in range(2)] == [7, 2]
    assert torch.zeros(2).double().index_add(0, policy.prompt, chances).tolist() == pytest.approx([1, 1])
    assert len(EQUAL[0].answers()) == 9 and set(map(len, ONE[0].answers())) == {1, 2}
    for together, groups in ((False, 1), (True, 84 * 4)):
        parts = list(policy.batches(3, together))
        assert len(parts) == groups
        total = sum(float(chance[batch["group"] == batch["group"][0]][0]) for _, batch, chance in parts)
        assert not together or total == pytest.approx(1)


def test_objectives_by_hand():
    """One token, one prompt, symbols 1 and 2: everything in closed form."""
    policy = TinyPolicy((Prompt(positions=1, first=1),), binary=False)
    p = torch.softmax(policy.logits[0, 1:], 0)
    scores, n = policy.columns["scores"], 3
    slope = float(p[0] * p[1])  # d p_0 / d logit_0
    high, low = float(scores.max()), float(scores.min())
    best = int(scores.argmax())
    sign = [1.0, -1.0][best]  # of d p_best / d logit_0
    expected = {
        "reward": sign * slope * (high - low),
        "max reward": sign * slope * n * float(1 - p[best]) ** (n - 1) * (high - low),
    }
    for name, wanted in expected.items():
        logits = policy.logits.clone().requires_grad_()
        value = OBJECTIVES[name](policy, logits, n, {})
        assert float(torch.autograd.grad(value, logits)[0][0, 1]) == pytest.approx(wanted), name
    logits = policy.logits.clone().requires_grad_()
    entropy = OBJECTIVES["entropy per position"](policy, logits, n, {})
    assert float(entropy.detach()) == pytest.approx(float(-(p * p.log()).sum()))


def test_log_likelihood_by_hand():
    policy = TinyPolicy((Prompt(positions=1, first=1),), binary=True)
    p = float((policy.probabilities(policy.logits) * policy.columns["scores"]).sum())
    value = OBJECTIVES["log likelihood to order n"](policy, policy.logits, 3, {})
    assert 0 < p < 1 and float(value) == pytest.approx(-(1 - p) - (1 - p) ** 2 / 2 - (1 - p) ** 3 / 3)


def test_relations():
    wanted = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    apart = wanted + torch.tensor([2.0, -1.0, 0.0]) * 1e-6
    for found, name, factor, cosine in (
        (wanted, "exact", 1, 1),
        (wanted * 0.25, "scaled", 0.25, 1),
        (wanted * -1, "near", -1, -1),
        (wanted * 0, "none", 0, 0),
        (apart, "near", 1, 1),
        (wanted + torch.tensor([2.0, -1.0, 0.0]), "near", 1, 3 / 14**0.5),
    ):
        result = compare(found, wanted, "reward", 1e-10)
        assert (result.relation, result.factor, result.cosine) == (name, pytest.approx(factor), pytest.approx(cosine))


def test_a_prover_that_can_fail():
    """Plugins with one thing wrong in each: what fails of them."""

    @of()
    def wrong_sign(logprobs, batch):
        return -reinforce(logprobs, batch)[0], {}

    @of()
    def dropped_detach(logprobs, batch):
        ratio = log_ratio(logprobs, batch["old_logprobs"], batch["loss_mask"]).clamp(-20, 20).exp()
        return ratio * reinforce(logprobs, batch)[0], {}

    @of()
    def divided_by_the_width(logprobs, batch):
        return reinforce(logprobs, batch)[0] / batch["loss_mask"].shape[1], {}

    @of()
    def reduced(logprobs, batch):
        return reinforce(logprobs, batch)[0].mean(), {}

    @of()
    def statistics_with_a_gradient(logprobs, batch):
        return reinforce(logprobs, batch)[0], {"logprob": torch.where(batch["loss_mask"], logprobs, 0.0)}

    @of()
    def centred_over_the_batch(logprobs, batch):
        advantages = torch.where(batch["loss_mask"], batch["advantages"], 0.0)
        return torch.where(batch["loss_mask"], -(advantages - advantages.mean()) * logprobs, 0.0), {}

    @of()
    def without_a_mask(logprobs, batch):
        row = (logprobs - batch["old_logprobs"]).detach().sum(1, keepdim=True).clamp(-20, 20).exp()
        return row * reinforce(logprobs, batch)[0], {}

    @of()
    def without_a_clamp(logprobs, batch):
        ratio = log_ratio(logprobs, batch["old_logprobs"], batch["loss_mask"]).exp()
        return torch.where(batch["loss_mask"], -batch["advantages"] * ratio, 0.0), {}

    @of()
    def weighed_by_place(logprobs, batch):
        loss, _ = reinforce(logprobs, batch)
        return loss * torch.arange(1, 1 + len(loss))[:, None], {}

    @of()
    def mean_of_nothing(logprobs, batch):
        loss, _ = reinforce(logprobs, batch)
        return loss * batch["loss_mask"].any().double() / batch["loss_mask"].any().double(), {}

    calls = []

    @of()
    def remembering(logprobs, batch):
        calls.append(logprobs.detach())
        return reinforce(logprobs, batch)[0] / len(calls), {}

    whole = {
        remembering: ("scaled", None, {"repetition"}),
        wrong_sign: ("near", -1.0, set()),
        dropped_detach: ("near", None, set()),
        divided_by_the_width: ("scaled", 1 / 8, {"padding"}),
        reduced: (None, None, {"shape"}),
        statistics_with_a_gradient: (None, None, {"shape"}),
        centred_over_the_batch: ("near", None, {"padding", "micro-batches"}),
        without_a_mask: ("exact", 1.0, {"outside keep"}),
        without_a_clamp: ("exact", 1.0, {"extreme log-ratios"}),
        weighed_by_place: ("near", None, {"row order", "micro-batches"}),
        mean_of_nothing: ("exact", 1.0, {"empty rows"}),
    }
    for plugin, (relation, factor, failed) in whole.items():
        found = certificate(plugin, "loss")
        assert {name for name, holds in found.checks.items() if not holds} == failed, plugin.name
        assert (found.measured and found.measured.relation) == relation, plugin.name
        assert factor is None or found.measured.factor == pytest.approx(factor)
        assert not found.holds
    assert set.union(*(failed for _, _, failed in whole.values())) == {"shape", *CHECKS, *LOSS_CHECKS}
    assert certificate(of()(reinforce), "loss").holds


def test_advantages_and_aggregations_are_examined_too():
    @of({"gradient": Gradient("scaled", factor=lambda n: (n - 1) / n)}, kind="advantage")
    def over_the_width(scores, rewards, batch):
        groups = batch["group"]
        same = (groups[:, None] == groups).double()
        centred = scores - same @ scores / same.sum(1)
        return {"advantages": torch.where(batch["loss_mask"], centred[:, None] / batch["loss_mask"].shape[1], 0.0)}

    found = certificate(over_the_width, "advantage")
    assert found.measured.factor == pytest.approx(2 / 3 / 3) and not found.as_declared
    assert [name for name, holds in found.checks.items() if not holds] == ["padding"]

    @of(kind="aggregation")
    def mean(keep, group):
        return keep / keep.numel()

    assert [name for name, holds in invariances(mean, "aggregation").items() if not holds] == ["padding"]


@pytest.mark.parametrize(
    ("declared", "holds"),
    [
        (None, False),
        (Gradient("exact"), False),
        (Gradient("scaled"), True),
        (Gradient("scaled", factor=lambda n: 0.5), True),
        (Gradient("scaled", factor=lambda n: 1 / n), False),
        (Gradient("near", cosine=1.0), False),
        (Gradient("none"), False),
    ],
)
def test_a_declaration_is_compared_with_what_was_measured(declared, holds):
    @of({"gradient": declared})
    def half(logprobs, batch):
        return 0.5 * reinforce(logprobs, batch)[0], {}

    assert certificate(half, "loss").as_declared is holds


def test_a_cosine_is_declared_to_three_digits():
    def stated(cosine):
        @of({"gradient": Gradient("near", cosine=cosine)})
        def first_token(logprobs, batch):
            first = batch["loss_mask"].cumsum(1) == 1
            return torch.where(first, reinforce(logprobs, batch)[0], 0.0), {}

        return certificate(first_token, "loss")

    cosine = stated(0.5).measured.cosine
    assert stated(round(cosine, 3)).same_cosine
    assert not stated(cosine + 1e-3).same_cosine and not stated(cosine - 1e-3).same_cosine
    assert stated(cosine + 0.1).holds, "it is near, if at another number"


def test_a_column_that_is_not_stated_is_refused():
    with pytest.raises(ValueError, match=r"loss 'reinforce': name every column that it reads in `reads`: .*advantages"):
        certificate(of({"reads": ()})(reinforce), "loss")


def test_an_unknown_target_is_refused():
    plugin = of({"gradient": Gradient("exact", target="rewards")})(reinforce)
    with pytest.raises(ValueError, match=r"loss 'reinforce' states the target 'rewards'; did you mean reward\?"):
        certificate(plugin, "loss")


def test_the_std_of_a_group_is_a_rescale_for_binary_scores_of_one_prompt():
    plugin = ADVANTAGES.build({"name": "group_norm", "scale": "group"}, "advantage")

    def relation(policy):
        wanted = objective_gradient(policy, plugin, "reward")
        return compare(expected_gradient(policy, plugin, "advantage"), wanted, "reward", 1e-10)

    found = relation(TinyPolicy(ONE, binary=True))
    # groups of 3 with 1 or 2 right answers have the std sqrt(1/3), and (R - mean) / n is short of a row in 3
    assert found.relation == "scaled" and found.factor == pytest.approx(2 / 3 * 3**0.5, rel=1e-5)
    assert relation(TinyPolicy(ONE)).cosine < 0.995


def test_k1_as_a_term_has_no_gradient_and_in_the_reward_it_is_exact():
    @of({"reads": ("ref_logprobs",), "gradient": Gradient("none", "kl")})
    def term(logprobs, batch):
        return log_ratio(logprobs, batch["ref_logprobs"], batch["loss_mask"]), {}

    policy = TinyPolicy()
    assert expected_gradient(policy, term, "loss").norm() < 1e-12 * policy.logits.shape[0]

    @of({"reads": ("old_logprobs", "ref_logprobs"), "gradient": Gradient("exact", "kl")}, kind="advantage")
    def reward(scores, rewards, batch):
        row = (batch["ref_logprobs"] - batch["old_logprobs"]).sum(1, keepdim=True)
        return {"advantages": torch.where(batch["loss_mask"], row, 0.0)}

    assert measure(reward, "advantage", "kl").relation == "exact"
