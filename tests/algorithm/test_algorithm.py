"""An algorithm from its yaml: which columns it reads, in which order it shapes, and what it refuses."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm import ADVANTAGES, LOSSES, SHAPINGS
from rft.algorithm.options import RewardKL
from rft.batch.collate import dummy_row
from rft.metrics import Metrics
from tests.helpers import plain_algorithm

CLIP = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}
KL = {"name": "kl", "estimator": "k3", "coef": 0.1}
ADAPTIVE = {"name": "adaptive", "initial": 0.1, "target": 2.0, "horizon": 100.0}
OVERLONG = {"name": "overlong", "of": "answer", "max_tokens": 3, "buffer": 2 / 3, "factor": 1.0}


GAE = {
    "advantage": {"name": "gae", "gamma": 1.0, "lam": 0.95, "whiten": True},
    "critic_loss": {"name": "value", "clip": 0.2},
}


@pytest.mark.parametrize(
    ("changes", "reads"),
    [
        ({}, {"scores", "loss_mask", "group", "old_logprobs", "advantages"}),
        ({"advantage": None, "loss": {"name": "nll"}}, {"loss_mask", "group"}),
        ({"terms": {"kl": KL}}, {"scores", "loss_mask", "group", "old_logprobs", "advantages", "ref_logprobs"}),
        (
            {"reward_kl": RewardKL("k1", 0.1)},
            {"scores", "loss_mask", "group", "old_logprobs", "advantages", "ref_logprobs"},
        ),
        (
            {"reward_kl": RewardKL("k1", 0.1), "loss": {"name": "nll"}},
            {"scores", "loss_mask", "group", "old_logprobs", "ref_logprobs"},
        ),
        (GAE, {"scores", "loss_mask", "group", "old_logprobs", "advantages", "values", "returns"}),
    ],
)
def test_what_is_read_decides_which_actors_exist(changes, reads):
    assert plain_algorithm(**changes).reads() == reads


@pytest.mark.parametrize(
    ("changes", "updates", "idle"),
    [
        ({}, 1, ["loss.clip_low", "loss.clip_high"]),
        ({"loss": CLIP | {"dual_clip": 3.0}}, 1, ["loss.clip_low", "loss.clip_high", "loss.dual_clip"]),
        ({}, 2, []),
        ({"old_logprobs": "rollout"}, 1, []),
        ({"terms": {"kl": KL, "held": {"name": "drift", "coef": 0.1}}}, 1, ["loss.clip_low", "loss.clip_high",
                                                                           "terms.held.coef"]),
        (GAE | {"old_logprobs": "rollout"}, 1, ["critic_loss.clip"]),
        ({"advantage": None, "loss": {"name": "nll"}}, 1, []),
    ],
)  # fmt: skip
def test_options_that_one_update_leaves_without_effect(changes, updates, idle):
    assert sorted(plain_algorithm(**changes).idle_options(updates)) == sorted(idle)


def test_stages_say_who_reads_and_who_writes():
    algorithm = plain_algorithm(
        **GAE, shaping={"overlong": OVERLONG}, terms={"entropy": {"name": "entropy", "coef": 0.1}}
    )
    assert algorithm.stages() == [
        ("algorithm.shaping", ("scores",), ()),
        ("algorithm.advantage", ("scores", "values"), ("advantages", "returns")),
        ("algorithm.aggregation", ("loss_mask", "group"), ("loss_weights",)),
        ("algorithm.loss", ("old_logprobs", "advantages"), ()),
        ("algorithm.critic_loss", ("values", "returns"), ()),
    ]
    assert algorithm.policy.outputs == ("logprobs", "entropy")
    assert algorithm.learners["critic"].outputs == ("values",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"loss": {"name": "ppo_clp"}},
            r"^algorithm\.loss\.name: no loss is called 'ppo_clp'; did you mean ppo_clip\?",
        ),
        ({"loss": CLIP | {"clip_hgh": 1.0}}, r"^algorithm\.loss\.clip_hgh: .* did you mean clip_high\?"),
        (
            {"loss": {"name": "value", "clip": None}},
            r"^algorithm\.loss: 'value' is a loss of the critic, not of the pol",
        ),
        ({"critic_loss": CLIP}, r"^algorithm\.critic_loss: 'ppo_clip' is not a loss of the critic, a value model"),
        (
            {"terms": {"v": {"name": "value", "clip": None, "coef": 1.0}}},
            r"'value' trains the head 'value', but 'ppo_clip' the head",
        ),
        ({"terms": {"kl": {"name": "kl", "estimator": "k3"}}}, r"^algorithm\.terms\.kl\.coef is missing: every term"),
        ({"terms": {"kl": 0.1}}, r"^algorithm\.terms\.kl\.coef is missing"),
        ({"terms": {"kl": KL | {"coef": "0.1"}}}, r"^algorithm\.terms\.kl\.coef: expected number, got '0\.1'"),
        (
            {"terms": {"kl": KL | {"estimator": "k1"}}},
            r"^algorithm\.terms\.kl\.estimator: expected one of k2, k2_row, k3",
        ),
        (
            {"terms": {"kl": KL | {"coef": ADAPTIVE | {"target": 0.0}}}},
            r"^algorithm\.terms\.kl\.coef\.target=.*: it must be above 0",
        ),
        (
            {"reward_kl": RewardKL("k1", {"name": "adaptve"})},
            r"^algorithm\.reward_kl\.coef\.name: .*did you mean adaptive",
        ),
        ({"reward_kl": RewardKL("k1", None)}, r"^algorithm\.reward_kl\.coef: expected number, got None"),
        ({"aggregation": {"name": "token_men"}}, r"^algorithm\.aggregation\.name: .*did you mean token_mean"),
        (
            {"advantage": {"name": "gae", "gamma": 1.0}},
            r"^algorithm\.advantage\.lam is missing: advantage 'gae' needs it",
        ),
        (
            {"terms": {"ppo_clip": KL}},
            r"^algorithm\.terms\.ppo_clip: the loss goes by this name; give the term another",
        ),
        (
            {"advantage": None, "loss": {"name": "nll"}, "shaping": {"overlong": OVERLONG}},
            r"^algorithm\.shaping changes scores, which only algorithm\.advantage reads; take it out$",
        ),
        (
            {"advantage": None, "loss": {"name": "nll"}, "reward_kl": RewardKL("k1", 0.1)},
            r"^algorithm\.reward_kl changes scores",
        ),
        ({"shaping": {"x": {"name": "overlng"}}}, r"^algorithm\.shaping\.x\.name: no shaping is called 'overlng'; did"),
    ],
)
def test_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        plain_algorithm(**changes)


@pytest.mark.parametrize(("mask_truncated", "second"), [(False, [False, True, True]), (True, [False] * 3)])
def test_rows_that_were_cut_off_may_be_left_out(mask_truncated, second):
    response = torch.tensor([[False, True, False], [False, True, True]])
    batch = TensorDict({"response_mask": response, "truncated": torch.tensor([False, True])}, batch_size=[2])
    plain_algorithm(mask_truncated=mask_truncated).build_loss_mask(batch)
    assert batch["loss_mask"].tolist() == [[False, True, False], second]
    batch["loss_mask"][0, 1] = False
    assert response.tolist() == [[False, True, False], [False, True, True]], "the response mask itself never changes"


def test_no_half_of_a_pair_is_left():
    response = torch.tensor([[False, True]] * 4)
    columns = {"response_mask": response, "truncated": torch.tensor([False, False, True, False])}
    columns |= {"unit": torch.tensor([5, 3, 3, 5]), "chosen": torch.tensor([True, False, True, False])}
    batch = TensorDict(columns, batch_size=[4])
    loss = {"name": "dpo", "beta": 0.1, "label_smoothing": 0.0}
    plain_algorithm(advantage=None, loss=loss, aggregation=None, mask_truncated=True).build_loss_mask(batch)
    assert batch["loss_mask"].any(1).tolist() == [True, False, False, True]


SCORES = torch.tensor([0.5, 1.0, 0.0, 1.0, 0.2, 0.2, 0.7])
GROUP = torch.tensor([8, 8, 8, 8, 3, 3, 5])
UNIT = torch.tensor([80, 83, 81, 82, 30, 31, 50])


@pytest.mark.parametrize("order", [list(range(7)), [6, 3, 0, 5, 2, 4, 1]])
def test_the_best_row_of_a_group_may_train_alone_or_with_the_worst(order):
    def filtered(**changes):
        columns = {"response_mask": torch.tensor([[False, True]] * 7), "truncated": torch.zeros(7, dtype=torch.bool)}
        batch = TensorDict(columns | {"scores": SCORES, "group": GROUP, "unit": UNIT}, batch_size=[7])[order]
        plain_algorithm(advantage=None, **changes).build_loss_mask(batch)
        return batch, set(batch["unit"][batch["loss_mask"].any(1)].tolist())

    loss = {"loss": {"name": "nll"}}
    assert filtered(**loss, pick="best")[1] == {82, 30, 50}  # 82 and 83 are as good
    assert filtered(**loss, pick="best", mask_tied=True)[1] == {82}
    loss = {"loss": {"name": "dpo", "beta": 0.1, "label_smoothing": 0.0}, "aggregation": None}
    batch, units = filtered(**loss, pick="best_and_worst")
    assert units == {82}, "groups without a difference are idle"
    rows = {order[place]: place for place in range(7)}
    assert batch["unit"][rows[2]] == batch["unit"][rows[3]] == 82
    assert batch["chosen"][rows[3]] and not batch["chosen"][rows[2]]
    assert sorted(batch["unit"][[rows[row] for row in (0, 1)]].tolist()) == [80, 83], "the others are alone"


TIED = torch.tensor([0.3 * 7, 1.0, 2.1, 1.0, 1.0, 0.0]), torch.tensor([4, 7, 4, 7, 2, 2])  # 4 and 7 are tied


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_rows_of_tied_groups_may_be_left_out(mask_truncated):
    scores, group = TIED
    columns = {
        "response_mask": torch.ones(6, 3, dtype=torch.bool),
        "truncated": torch.tensor([False] * 5 + [True]),
        "scores": scores,
        "group": group,
    }
    algorithm = plain_algorithm(mask_tied=True, mask_truncated=mask_truncated, aggregation={"name": "group_mean"})
    batch = TensorDict(columns, batch_size=[6])
    algorithm.build_loss_mask(batch)
    assert batch["loss_mask"][:, 1:].any(1).tolist() == [False] * 4 + [True, not mask_truncated]
    algorithm.compute_loss_weights(batch, alone)
    assert batch["loss_weights"].sum() == pytest.approx(1), "the one group that is left has all the weight"
    assert batch["unit_weights"].tolist() == pytest.approx([0] * 4 + ([1, 0] if mask_truncated else [0.5, 0.5]))
    every = TensorDict(columns, batch_size=[6])
    plain_algorithm(mask_truncated=mask_truncated).build_loss_mask(every)
    assert every["loss_mask"][:4, 1:].all()


def test_tied_groups_count_in_no_deviation_either():
    """One group of 0 and 1 beside tied ones: the deviation of the batch is that of the one."""
    scores, group = TIED
    keep = torch.ones(6, 3, dtype=torch.bool)
    batch = TensorDict(
        {"response_mask": keep, "truncated": ~keep[:, 0], "scores": scores, "group": group}, batch_size=[6]
    )
    algorithm = plain_algorithm(mask_tied=True, advantage={"name": "group_norm", "scale": "batch"})
    algorithm.build_loss_mask(batch)
    algorithm.estimate_advantages(batch, alone, Metrics())
    expected = 0.5 / (0.5**0.5 + 1e-6)
    assert batch["advantages"][:, 1].tolist() == pytest.approx([0, 0, 0, 0, expected, -expected])


def test_where_every_group_is_tied_nothing_trains_and_nothing_fails():
    keep = torch.ones(4, 3, dtype=torch.bool)
    columns = {"response_mask": keep, "truncated": ~keep[:, 0], "group": torch.tensor([0, 0, 1, 1])}
    batch = TensorDict(columns | {"scores": torch.tensor([1.0, 1.0, 0.0, 0.0])}, batch_size=[4])
    algorithm = plain_algorithm(mask_tied=True, advantage={"name": "group_norm", "scale": "batch"})
    algorithm.build_loss_mask(batch)
    algorithm.estimate_advantages(batch, alone, Metrics())
    algorithm.compute_loss_weights(batch, alone)
    assert not batch["loss_mask"].any()
    assert batch["advantages"].eq(0).all() and batch["loss_weights"].eq(0).all()


def scored():
    keep = torch.tensor([[False, True, True, False], [False, True, True, True]])
    columns = {
        "response_mask": keep,
        "loss_mask": keep,
        "group": torch.tensor([0, 0]),
        "scores": torch.tensor([1.0, 2.0]),
        "old_logprobs": torch.tensor([[9.0, -1.0, -2.0, 9.0], [9.0, -1.0, -1.0, -1.0]]),
        "ref_logprobs": torch.tensor([[0.0, -2.0, -4.0, 0.0], [0.0, -1.0, -2.0, -1.0]]),
    }
    return TensorDict(columns, batch_size=[2])


def alone(tensor):
    return tensor


def advantages(algorithm):
    batch, metrics = scored(), Metrics()
    algorithm.estimate_advantages(batch, alone, metrics)
    return batch, metrics.reduce(lambda mine: [mine])


def test_scores_are_shaped_then_kl_is_taken_off_then_they_are_compared():
    algorithm = plain_algorithm(shaping={"overlong": OVERLONG}, reward_kl=RewardKL("k1", 0.1))
    batch, numbers = advantages(algorithm)
    # lengths 2 and 3: punished by 0.5 and 1; KL sums 1 + 2 and 0 + 1: scores 0.5 - 0.3 and 1 - 0.1, mean 0.55
    assert batch["advantages"].tolist() == [
        pytest.approx([0, -0.35, -0.35, 0]),
        pytest.approx([0, 0.35, 0.35, 0.35]),
    ]
    assert batch["scores"].tolist() == [1.0, 2.0], "the column of the reward stays"
    assert numbers == pytest.approx({"reward/shaped": 0.75, "kl/reward": 4 / 5})


@pytest.mark.parametrize(
    ("order", "shaped", "expected"),
    [
        (("centred", "limited"), 0.25, [-0.25, 0.25]),  # 1, 2 -> -0.5, 0.5 -> 0, 0.5
        (("limited", "centred"), 0.0, [-0.5, 0.5]),  # 1, 2 -> 1, 2 -> -0.5, 0.5
    ],
)
def test_shapings_run_in_order(order, shaped, expected):
    nodes = {
        "centred": {"name": "batch_norm", "center": True, "scale": False},
        "limited": {"name": "clip_scores", "low": 0.0, "high": 9.0},
    }
    batch, numbers = advantages(plain_algorithm(shaping={name: nodes[name] for name in order}))
    assert numbers == pytest.approx({"reward/shaped": shaped})
    assert batch["advantages"][:, 1].tolist() == pytest.approx(expected)


def test_kl_in_the_reward_is_paid_by_its_token():
    algorithm = plain_algorithm(advantage={"name": "reinforce_pp", "gamma": 1.0}, reward_kl=RewardKL("k1", 0.1))
    batch, _ = advantages(algorithm)
    # rewards: [-0.1, 1 - 0.2] and [0, -0.1, 2]; sums of what follows, whitened over the five
    following = torch.tensor([0.7, 0.8, 1.9, 1.9, 2.0], dtype=torch.float64)
    white = (following - following.mean()) / following.std()
    assert batch["advantages"][batch["loss_mask"]].tolist() == pytest.approx(white.tolist(), rel=1e-5)
    assert not batch["advantages"][~batch["loss_mask"]].any()


def test_without_an_advantage_nothing_is_written():
    batch, numbers = advantages(plain_algorithm(advantage=None, loss={"name": "nll"}))
    assert "advantages" not in batch.keys() and numbers == {}


def test_weights_are_over_all_ranks():
    batch, others = scored(), []

    def all_sum(tensor):
        others.append(tensor)
        return tensor + 5  # what another rank has

    plain_algorithm().compute_loss_weights(batch, all_sum)
    assert batch["loss_weights"].tolist() == [[0, *[pytest.approx(0.1)] * 2, 0], [0, *[pytest.approx(0.1)] * 3]]
    assert batch["unit_weights"].tolist() == [pytest.approx(1 / 7)] * 2
    assert [int(tensor) for tensor in others] == [5, 2]


def test_controllers_are_steered_by_their_own_kl():
    terms = {"kl": KL | {"coef": ADAPTIVE}, "entropy": {"name": "entropy", "coef": 0.5}}
    algorithm = plain_algorithm(terms=terms, reward_kl=RewardKL("k1", ADAPTIVE | {"initial": 1.0}))
    algorithm.update_controllers({"kl/reward": 2.2, "kl/ref": 9.0}, rows=50)
    # 10 % over the target; far over it, so clipped to 20 %
    assert algorithm.reward_control.coef == pytest.approx(1.0 * (1 + 0.1 * 50 / 100))
    assert [term.coef.coef for term in algorithm.policy.terms] == pytest.approx([1.0, 0.1 * (1 + 0.2 * 50 / 100), 0.5])
    algorithm.update_controllers({}, rows=50)
    algorithm.update_controllers({"kl/reward": math.nan, "kl/ref": math.inf}, rows=50)
    assert algorithm.reward_control.coef == pytest.approx(1.05)
    assert algorithm.policy.terms[1].coef.coef == pytest.approx(0.11)


def test_coefficients_come_back():
    def build():
        return plain_algorithm(terms={"kl": KL | {"coef": ADAPTIVE}}, reward_kl=RewardKL("k1", ADAPTIVE))

    algorithm, other = build(), build()
    algorithm.update_controllers({"kl/reward": 9.0, "kl/ref": 0.0}, rows=10)
    other.load_state_dict(algorithm.state_dict())
    assert other.reward_control.coef == algorithm.reward_control.coef != 0.1
    assert other.policy.terms[1].coef.coef == algorithm.policy.terms[1].coef.coef != 0.1
    plain_algorithm().load_state_dict(plain_algorithm().state_dict())


def test_an_advantage_remembers_and_logs():
    def build():
        return plain_algorithm(advantage={"name": "rae", "decay": 0.5}, critic_loss=None)

    algorithm, other, metrics = build(), build(), Metrics()
    batch = scored()
    batch["agent"] = torch.tensor([1, 1])
    algorithm.build_loss_mask(batch)
    algorithm.estimate_advantages(batch, alone, metrics)
    mean = 0.75 * batch["scores"].mean().item()
    assert metrics.reduce(lambda value: [value])["advantage/baseline_1"] == pytest.approx(mean)
    other.load_state_dict(algorithm.state_dict())
    assert other.state_dict()["advantage"] == algorithm.state_dict()["advantage"] == {"1": pytest.approx(mean)}
    build().load_state_dict(plain_algorithm().state_dict())  # a fork of a run with another advantage


class Streak:
    """Cannot be saved: it lacks `load_state_dict`."""

    def state_dict(self):
        return {}


def test_a_plugin_whose_state_no_checkpoint_would_save_is_refused(monkeypatch):
    monkeypatch.setattr(SHAPINGS, "_entries", dict(SHAPINGS._entries))
    SHAPINGS.register("streak", state=Streak)(lambda scores, batch, *, state: scores)
    with pytest.raises(
        ValueError, match=r"^algorithm\.shaping\.s: the state of the shaping 'streak', a Streak, has no "
    ):
        plain_algorithm(shaping={"s": {"name": "streak"}})
    monkeypatch.setattr(ADVANTAGES, "_entries", dict(ADVANTAGES._entries))
    ADVANTAGES.register("streak", state=Streak)(lambda scores, rewards, batch, *, state: {"advantages": rewards})
    with pytest.raises(ValueError, match=r"^algorithm\.advantage: the state of the advantage 'streak', a Streak, has"):
        plain_algorithm(advantage={"name": "streak"})


def test_an_idle_row_weighs_nothing():
    batch = scored()
    plain_algorithm().compute_loss_weights(batch, alone)
    batch["prepared"] = torch.ones(2, 4)
    row = dummy_row(batch.exclude("prepared"), batch[:0])
    assert row["prepared"].tolist() == [[0.0] * 4]
    assert len(row) == 1 and not row["loss_mask"].any()
    assert not row["loss_weights"].any() and not row["unit_weights"].any()
    assert row["response_mask"].equal(batch["response_mask"][:1])
    assert batch["loss_mask"][0].any(), "the batch keeps its row"


def test_a_loss_whose_unit_nothing_weighs_is_refused(plugins_forgotten):
    LOSSES.register("of_words", unit="word")(lambda logprobs, batch: (logprobs, {}))
    with pytest.raises(
        ValueError, match=r"algorithm\.loss: 'of_words' states unit='word'.*token, sequence, pair, group$"
    ):
        plain_algorithm(loss={"name": "of_words"})
