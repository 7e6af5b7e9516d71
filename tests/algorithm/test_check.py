"""Functions that do not go together, and what a method says of the passes that it needs."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm import LOSSES
from rft.algorithm.check import check_flow
from rft.algorithm.options import CorrectionOptions, RewardKL, Rule, TurnRewards
from rft.batch.columns import SOURCE_COLUMNS
from rft.metrics import Metrics
from tests.helpers import plain_algorithm

CLIP = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
TOKEN_TIS = Rule("ratio", "token", None, "clamp", None, 2.0, "any")
GEO_RS = Rule("ratio", "sequence", "geometric", "mask", 0.9, 1.1, "any")


@pytest.fixture(autouse=True)
def losses_of_rows_and_groups(plugins_forgotten):
    """A loss of rows and one of groups, for the time of a test."""
    LOSSES.register("of_rows", unit="sequence")(lambda logprobs, batch: (logprobs.sum(1), {}))
    LOSSES.register("of_groups", unit="group")(lambda logprobs, batch: (logprobs.sum(1), {}))
    LOSSES.register("prepared", outputs=("entropy",), prepare=lambda entropy, batch: {})(
        lambda entropy, batch: (entropy, {})
    )


def make(**changes):
    return plain_algorithm({"right": 1.0}, **changes)


def correction(anchor, *rules):
    return CorrectionOptions(anchor, False, {f"rule{number}": rule for number, rule in enumerate(rules)})


ROWS, GROUPS = {"loss": {"name": "of_rows"}, "aggregation": None}, {"loss": {"name": "of_groups"}, "aggregation": None}
PAIRS = {"loss": {"name": "dpo", "beta": 0.1, "label_smoothing": 0.0}, "aggregation": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregation": None}, r"^algorithm\.aggregation is null, but 'ppo_clip' needs the weight of a token"),
        (
            {"mask_tied": True, "advantage": None, "loss": {"name": "nll"}},
            r"^algorithm\.mask_tied compares scores, which nothing reads without algorithm\.advantage",
        ),
        ({"mask_tied": True, "group_size": 1}, r"^algorithm\.mask_tied: a group of one is always tied"),
        (
            {"loss": {"name": "of_rows"}},
            r"^algorithm\.aggregation=token_mean weighs tokens, but 'of_rows' has a value per sequence; choose "
            "algorithm/aggregation=none",
        ),
        (
            ROWS | {"terms": {"entropy": {"name": "entropy", "coef": 0.1}}},
            r"^algorithm\.aggregation is null, but 'entropy' needs the weight of a token",
        ),
        (
            {"terms": {"positive_nll": {"name": "positive_nll", "term": "rihgt", "coef": 0.1}}},
            r"^algorithm\.terms\.positive_nll\.term=rihgt: none of reward\.terms, which are right; did you mean right",
        ),
        (
            GROUPS | {"pick": {"name": "resample", "power": 2.0}},
            r"^algorithm\.pick=resample draws single rows, but 'of_groups' needs whole groups",
        ),
        (PAIRS | {"pick": {"name": "resample", "power": 2.0}}, r"draws single rows, but 'dpo' needs whole pairs"),
        (PAIRS | {"correction": correction("rollout", GEO_RS)}, r"^algorithm\.correction may reject one row of a pair"),
        (
            {"pick": "best_and_worst"},
            r"^algorithm\.pick=best_and_worst makes pairs, but 'ppo_clip' has a value per token; .*\.pick=best$",
        ),
        ({"pick": "best", "group_size": 1}, r"^algorithm\.pick=best: set algorithm\.group_size to 2 or more"),
        ({"critic_warmup": 2}, r"^algorithm\.critic_warmup=2: there is no critic to train alone; set it to 0"),
        (
            {"advantage": {"name": "gdpo"}, "reward_kl": RewardKL("k1", 0.1)},
            r"^algorithm\.reward_kl changes scores, but the advantage 'gdpo' is a formula of the raw scores",
        ),
        (
            {"advantage": {"name": "gdpo"}, "turn_rewards": TurnRewards(1.0, 1.0)},
            r"^algorithm\.turn_rewards changes scores, but the advantage 'gdpo' is a formula of the raw scores",
        ),
        (
            {"advantage": None, "loss": {"name": "nll"}, "turn_rewards": TurnRewards(1.0, 1.0)},
            r"^algorithm\.turn_rewards changes scores, which only algorithm\.advantage reads",
        ),
        ({"prm_loss": CLIP | {"name": "value"}}, r"algorithm\.prm_loss"),
        (
            {"correction": correction("old", GEO_RS), "old_logprobs": "rollout"},
            r"^algorithm\.correction\.anchor=old compares old with rollout .* algorithm\.old_logprobs=rollout",
        ),
        (
            ROWS | {"correction": correction("old", TOKEN_TIS)},
            r"^algorithm\.correction gives every token a weight, but 'of_rows' has a value per sequence",
        ),
        (
            {"correction": correction("old", TOKEN_TIS), "loss": {"name": "topr"}},
            r"^algorithm\.correction weighs with a ratio .*'topr' does so itself",
        ),
        (
            {"correction": correction("rollout", TOKEN_TIS)},
            r"^algorithm\.correction weighs with a ratio .*'ppo_clip' does so itself: it would count twice",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        ROWS,
        GROUPS,
        PAIRS | {"pick": "best_and_worst"},
        ROWS | {"pick": "best_and_worst"},
        {"pick": "best", "mask_tied": True, "advantage": None, "loss": {"name": "nll"}},
        ROWS | {"correction": correction("old", GEO_RS)},
        {"correction": correction("old", TOKEN_TIS)},
        {"correction": correction("rollout", GEO_RS), "old_logprobs": "rollout"},
        {"correction": correction("rollout", TOKEN_TIS), "loss": {"name": "reinforce"}},
    ],
)
def test_what_goes_together(changes):
    make(**changes)


@pytest.mark.parametrize(
    ("changes", "updates", "wanted"),
    [
        ({}, 1, {}),
        ({}, 2, {"logprobs": "old_logprobs"}),
        ({"old_logprobs": "rollout"}, 2, {}),
        ({"loss": {"name": "nll"}}, 2, {}),
        ({"reward_kl": RewardKL("k1", 0.1)}, 1, {"logprobs": "old_logprobs"}),
        ({"correction": correction("old", GEO_RS)}, 1, {"logprobs": "old_logprobs"}),
        ({"loss": {"name": "prepared"}}, 1, {"entropy": "old_entropy"}),
        ({"loss": {"name": "prepared"}, "old_logprobs": "rollout"}, 1, {}),
        (
            {"advantage": {"name": "optimal_token_baseline"}},
            1,
            {"sum_p_squared": "sum_p_squared", "logprobs": "old_logprobs"},
        ),
    ],
)
def test_passes_before_the_update_are_those_that_something_needs(changes, updates, wanted):
    assert make(**changes).old_columns(updates) == wanted


def test_prepares_is_what_mini_batches_need_of_the_current_policy():
    assert make().current_outputs == ()
    assert make(loss={"name": "prepared"}).current_outputs == ("entropy",)
    bypass = make(loss={"name": "prepared"}, correction=correction("rollout", GEO_RS))
    assert bypass.current_outputs == ("logprobs", "entropy")


def test_a_loss_of_groups_keeps_them_together():
    keep = torch.tensor([[False, True]] * 3)
    columns = {"response_mask": keep, "truncated": ~keep[:, 1], "group": torch.tensor([4, 7, 4])}
    batch = TensorDict(columns | {"unit": torch.tensor([0, 1, 2])}, batch_size=[3])
    make(**ROWS).build_loss_mask(batch)
    assert batch["unit"].tolist() == [0, 1, 2]
    make(**GROUPS).build_loss_mask(batch)
    assert batch["unit"].tolist() == [4, 7, 4]


def test_rejected_rows_are_in_no_statistic_of_their_group():
    keep = torch.tensor([[False, True, True]] * 4)
    rollout = torch.zeros(4, 3)
    rollout[3, 1:] = -1.0  # exp(1) off at every token
    columns = {
        "loss_mask": keep,
        "response_mask": keep,
        "group": torch.zeros(4, dtype=torch.int64),
        "scores": torch.tensor([1.0, 2.0, 6.0, 100.0]),
        "old_logprobs": torch.zeros(4, 3),
        "rollout_logprobs": rollout,
    }
    batch, metrics = TensorDict(columns, batch_size=[4]), Metrics()
    make(correction=correction("old", GEO_RS)).estimate_advantages(batch, lambda tensor: tensor, metrics)
    assert batch["advantages"][:, 1].tolist() == [-2.0, -1.0, 3.0, 0.0]
    assert batch["loss_mask"].any(1).tolist() == [True, True, True, False]


def test_scores_that_are_not_finite_are_refused_by_row():
    keep = torch.tensor([[False, True]] * 3)
    columns = {"loss_mask": keep, "group": torch.zeros(3, dtype=torch.int64)}
    batch = TensorDict(columns | {"scores": torch.tensor([1.0, -torch.inf, torch.inf])}, batch_size=[3])
    with pytest.raises(ValueError, match=r"scores of rows \[1, 2\] are not finite"):
        make().estimate_advantages(batch, lambda tensor: tensor, Metrics())


GMPO = {"loss": {"name": "gmpo", "clip_low": 20.0, "clip_high": 20.0}, "aggregation": None}


def test_gmpo_with_weights_is_the_geometric_mean_of_the_ratios_to_the_rollout_policy():
    """The weights are old / rollout, its own ratios now / old: one row, -A exp(mean of log now / rollout)."""
    made = make(correction=correction("old", Rule("ratio", "token", None, "clamp", None, None, "any")), **GMPO)
    old, rollout = torch.tensor([[[0.0, -1.0, -2.0]], [[0.0, -1.5, -2.3]]], dtype=torch.float64)
    now = torch.tensor([[0.0, -0.8, -2.1]], dtype=torch.float64)
    columns = {"old_logprobs": old, "rollout_logprobs": rollout, "group": torch.zeros(1, dtype=torch.long)}
    columns |= {"loss_mask": torch.tensor([[False, True, True]]), "unit_weights": torch.ones(1, dtype=torch.float64)}
    batch = TensorDict(columns | {"advantages": torch.full((1, 3), 2.0, dtype=torch.float64)}, batch_size=[1])
    made.correction.unsigned(old, batch, lambda tensor: tensor, Metrics())
    total, _, _ = made.policy({"logprobs": now}, batch, None)
    assert float(total) == pytest.approx(-2 * math.exp((0.7 + 0.2) / 2), rel=1e-12)


def test_gmpo_refuses_weights_by_the_ratio_of_the_current_policy():
    with pytest.raises(ValueError, match=r"^algorithm\.correction weighs with a ratio .*'gmpo' does so itself"):
        make(correction=correction("rollout", TOKEN_TIS), **GMPO)


SAMPLED = (*SOURCE_COLUMNS, "scores", "terms", "rollout_logprobs")


@pytest.mark.parametrize(
    ("changes", "writes", "message"),
    [
        (
            {"pick": {"name": "resample", "power": 2.0}},
            ("trajectory", "turn"),
            r"^algorithm\.pick=resample draws single rows, but a trajectory .* set algorithm\.pick=all$",
        ),
        (
            {},
            ("trajectory",),
            r"^algorithm\.source writes trajectory, whose rows are ordered by turn; let it write turn",
        ),
        (
            {"turn_rewards": TurnRewards(1.0, 1.0)},
            ("trajectory", "turn"),
            r"^algorithm\.turn_rewards reads the column 'turn_scores', which nothing before it writes",
        ),
        (
            {"advantage": {"name": "gigpo", "omega": 1.0, "discount": 1.0, "scale": "none"}},
            ("trajectory", "turn"),
            r"^algorithm\.advantage reads the column 'anchor', which nothing before it writes",
        ),
        ({"advantage": {"name": "rae", "decay": 0.9}}, (), r"^algorithm\.advantage reads the column 'agent'"),
        ({"terms": {"echo": {"name": "echo", "coef": 0.1}}}, (), r"^algorithm\.loss reads .* 'observation_mask'"),
    ],
)
def test_what_a_source_of_dialogues_must_write(changes, writes, message):
    algorithm = make(**{"critic_loss": None, **changes})
    with pytest.raises(ValueError, match=message):
        check_flow(algorithm, (*SAMPLED, *writes), ())
    columns = {"turn", "turn_scores", "anchor", "agent", "observation_mask"} | set(writes)
    if "resample" not in message:
        check_flow(algorithm, (*SAMPLED, *columns), ())
