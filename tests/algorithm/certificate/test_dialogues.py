"""The gradient on dialogues of two turns, enumerated: right, and the same in whatever rows a trajectory is written."""

import pytest
import torch

from rft.algorithm.certificate.dialogues import LAYOUTS, measure_dialogues, same_gradient, separate_rows
from rft.algorithm.options import CorrectionOptions, Rule, TurnRewards
from tests.helpers import plain_algorithm

PER_TURN = LAYOUTS["a row per turn"]
REINFORCE = {"loss": {"name": "reinforce"}, "critic_loss": None}
GAE = {
    "advantage": {"name": "gae", "gamma": 1.0, "lam": 1.0, "whiten": False},
    "critic_loss": {"name": "value", "clip": None},
}
GIGPO = {"name": "gigpo", "omega": 1.0, "discount": 0.95, "scale": "none"}
HGPO = {"name": "hgpo", "history": 1, "alpha": 1.0, "discount": 1.0, "scale": "none"}
CLIP = {"clip_low": 0.01, "clip_high": 0.01}
SOFT = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}


def algorithm(aggregation="seq_mean_token_sum", **changes):
    node = None if aggregation is None else {"name": aggregation}
    return plain_algorithm(**REINFORCE | {"aggregation": node} | changes)


def on_layouts(made, change=lambda rows: None):
    """The cosine to the gradient of the score, which is the same for every layout."""
    results = [measure_dialogues(made, layout, change) for layout in LAYOUTS.values()]
    assert all(same_gradient(gradient, results[0][1]) for _, gradient in results)
    return results[0][0]


def shared(rows):
    """Weighs each row by 1 / rows of its trajectory."""
    _, owner, count = rows["trajectory"].unique(return_inverse=True, return_counts=True)
    rows["chance"] /= count[owner]


def by_turn(rows):
    """Compares rows that train the same turn."""
    separate_rows(rows)
    rows["group"] = 3 * rows["group"] + torch.where(rows["response_mask"], rows["turn"], 0).amax(1)


@pytest.mark.parametrize(
    ("changes", "relation", "cosine"),
    [
        ({"advantage": {"name": "rloo"}}, "exact", 1.0),
        ({"advantage": {"name": "rloo"}, "aggregation": "token_mean"}, "scaled", 1.0),
        ({"advantage": {"name": "dr_grpo"}}, "scaled", 1.0),
        ({"advantage": {"name": "reinforce", "gamma": 1.0}}, "exact", 1.0),
        (GAE, "exact", 1.0),
        ({"advantage": {"name": "rae", "decay": 0.95}}, "exact", 1.0),
        ({"advantage": {"name": "rloo"}, "aggregation": "seq_mean_token_mean"}, "near", 0.986),
        ({"advantage": {"name": "rloo"}, "aggregation": "group_mean"}, "near", 0.998),
        ({"advantage": {"name": "group_norm", "scale": "group"}}, "near", 0.999),
        ({"advantage": {"name": "opo"}}, "near", 0.997),
        ({"advantage": GIGPO}, "near", 0.997),
        ({"advantage": GIGPO | {"scale": "group"}}, "near", 0.997),
        ({"advantage": HGPO}, "near", 0.987),
        ({"advantage": HGPO | {"scale": "group"}}, "near", 0.99),
    ],
)
def test_a_gradient_is_that_of_whole_trajectories(changes, relation, cosine):
    found = on_layouts(algorithm(**changes))
    assert found.relation == relation and found.cosine == pytest.approx(cosine, abs=6e-4)


@pytest.mark.parametrize(
    ("change", "cosine"), [(lambda rows: None, 1.0), (separate_rows, 0.9971), (shared, 0.9934), (by_turn, 0.9960)]
)
def test_rows_that_count_by_themselves_change_the_gradient(change, cosine):
    found, _ = measure_dialogues(algorithm(advantage={"name": "rloo"}), PER_TURN, change)
    assert found.cosine == pytest.approx(cosine, abs=6e-5)
    assert (found.relation == "exact") == (cosine == 1.0)


@pytest.mark.parametrize(
    ("loss", "aggregation"),
    [
        ({"name": "gspo", **CLIP}, "seq_mean_token_mean"),
        ({"name": "gspo_token", **CLIP}, "seq_mean_token_mean"),
        ({"name": "luspo", **CLIP}, "seq_mean_token_mean"),
        ({"name": "topr"}, "seq_mean_token_sum"),
        ({"name": "vespo", **SOFT}, "seq_mean_token_sum"),
        ({"name": "gmpo", **CLIP}, None),
        ({"name": "gvpo", "beta": 0.1}, None),
    ],
)
def test_a_ratio_is_that_of_a_whole_trajectory(loss, aggregation):
    made = algorithm(aggregation, loss=loss, advantage={"name": "dr_grpo"})

    def off_policy(rows):
        rows["old_logprobs"] = rows["rollout_logprobs"] = torch.where(rows["response_mask"], rows["ref_logprobs"], 0.0)

    on_layouts(made, off_policy)
    alone = measure_dialogues(made, PER_TURN, lambda rows: (off_policy(rows), separate_rows(rows)))[1]
    assert not same_gradient(alone, measure_dialogues(made, PER_TURN, off_policy)[1])


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_a_correction_of_sequences_is_one_of_whole_trajectories(anchor):
    rules = {
        "weigh": Rule("ratio", "sequence", "product", "clamp", None, 2.0, "any"),
        "reject": Rule("k3", "sequence", "mean", "mask", None, 0.3, "any"),
    }
    made = algorithm(advantage={"name": "rloo"}, correction=CorrectionOptions(anchor, False, rules))

    def off_policy(rows):
        rows["rollout_logprobs"] = torch.where(rows["response_mask"], rows["ref_logprobs"], 0.0)

    assert on_layouts(made, off_policy).cosine < 0.99


@pytest.mark.parametrize("name", ["rloo", "reinforce"])
def test_rewards_of_turns_make_the_gradient_of_their_discounted_sum(name):
    options = {"gamma": 1.0} if name == "reinforce" else {}
    made = algorithm(advantage={"name": name, **options}, turn_rewards=TurnRewards(discount=0.5, weight=1.0))

    def moved(rows):
        """The score as a reward of turn 1 (once), and of turn 2 (twice): in total, the score."""
        last = torch.where(rows["response_mask"], torch.arange(rows["turn"].shape[1]), -1).amax(1, keepdim=True)
        ends = torch.arange(rows["turn"].shape[1]) == last
        rows["turn_scores"] = torch.where(ends & (rows["turn"] == rows["final_turn"][:, None]), 1.0, 0.0)
        rows["turn_scores"] *= (rows["scores"] * 2 ** (rows["final_turn"] - 1))[:, None]
        rows["scores"] = torch.zeros_like(rows["scores"])

    def final(rows):
        _, owner = rows["trajectory"].unique(return_inverse=True)
        turn = torch.where(rows["response_mask"], rows["turn"], 0).amax(1)
        rows["final_turn"] = torch.zeros_like(turn).scatter_reduce(0, owner, turn, "amax")[owner]
        moved(rows)

    found = on_layouts(made, final)
    assert found.relation == "exact"
