"""Rows of one trajectory count as one: joined in the order of their turns, whatever the order of the rows."""

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm.joined_trajectories import JoinedTrajectories
from rft.algorithm.options import CorrectionOptions, Rule
from rft.algorithm.step import StepContext, prepare_batch, prepare_mini_batch
from rft.algorithm.trajectories import joined_rows, trajectories_of
from rft.batch.balance import Balance
from rft.batch.collate import collate
from rft.distributed import SINGLE_PROCESS, start
from rft.metrics import Metrics
from tests.e2e.host_waits import HostWaits
from tests.helpers import plain_algorithm

REINFORCE = {"loss": {"name": "reinforce"}}
OVERLONG = {"name": "overlong", "of": "answer", "max_tokens": 4, "buffer": 0.75, "factor": 1.0}
OVERLONG_EPISODE = OVERLONG | {"of": "episode", "buffer": 0.5}


def alone(tensor):
    return tensor


def row(trajectory, turns, score, group=0, **columns):
    """A row of a prompt token and tokens of these turns; those of turn 0 and of negative turns do not train."""
    turn = torch.tensor([0, *turns])
    tokens = {"input_ids": torch.arange(len(turn)) + 10 * trajectory, "attention_mask": torch.ones_like(turn)}
    plain = {
        "tokens": tokens,
        "response_mask": turn > 0,
        "turn": turn.clamp(min=0),
        "trajectory": trajectory,
        "group": group,
        "unit": trajectory,
        "truncated": False,
        "scores": torch.tensor(score),
        "rollout_logprobs": torch.zeros(len(turn)),
        "fields": {"trajectory": trajectory},
    }
    return plain | columns


def dialogues(**columns):
    """Trajectory 7 has two rows, that of its second turn first; 3 has one turn, 5 has two in a row."""
    rows = [
        row(7, [-1, 0, 2, 2], 1.0),
        row(3, [1, 1, 1], 0.0),
        row(5, [1, 0, 2], 0.4),
        row(7, [1, 0], 1.0),
    ]
    return collate(
        [each | {name: values[number] for name, values in columns.items()} for number, each in enumerate(rows)]
    )


def whole(**columns):
    """The same trajectories, a row each."""
    rows = [row(7, [1, 0, 2, 2], 1.0), row(3, [1, 1, 1], 0.0), row(5, [1, 0, 2], 0.4)]
    return collate(
        [each | {name: values[number] for name, values in columns.items()} for number, each in enumerate(rows)]
    )


def test_tokens_are_in_the_order_of_their_turns():
    batch = dialogues()
    trajectories = JoinedTrajectories(batch.clone().set("media", TensorDict({}, [4])))
    rows = trajectories.rows
    assert "media" not in rows.keys()
    assert rows["trajectory"].tolist() == [3, 5, 7] and rows["scores"].tolist() == pytest.approx([0.0, 0.4, 1.0])
    assert rows["turn"].tolist() == [[0, 1, 1, 1], [0, 1, 2, 0], [0, 1, 2, 2]]
    assert rows["response_mask"].sum(1).tolist() == [3, 2, 3] and not rows["response_mask"][:, 0].any()
    assert rows["tokens", "input_ids"].tolist() == [[0, 31, 32, 33], [0, 51, 53, 0], [0, 71, 73, 74]]
    assert rows.get("fields").tolist() == [{"trajectory": number} for number in (3, 5, 7)]
    numbers = torch.where(batch["response_mask"], torch.randn(batch["turn"].shape), 0.0)
    assert trajectories.split(trajectories.join(numbers)).equal(numbers)
    several = numbers[..., None] * torch.arange(3)
    assert trajectories.split(trajectories.join(several)).equal(several)
    assert trajectories.split(torch.tensor([3.0, 5.0, 7.0])).tolist() == [7, 3, 5, 7]
    assert trajectories.is_last.tolist() == [True, True, True, False]


def test_joining_is_differentiable():
    batch = dialogues()
    column = torch.zeros(batch["turn"].shape, requires_grad=True)
    JoinedTrajectories(batch).join(column).sum().backward()
    assert column.grad.bool().equal(batch["response_mask"])


def test_a_copy_on_another_device_is_the_same_and_reads_nothing_there():
    batch = dialogues()
    made, found = JoinedTrajectories(batch), []
    with HostWaits(found):
        copy = made.of_copy(other := batch.clone())
        rows, split, last = copy.rows, copy.split(copy.join(other["turn"])), copy.is_last
    assert found == []
    assert all(rows[name].equal(made.rows[name]) for name in made.rows.keys(True, True))
    assert split.equal(made.split(made.join(batch["turn"])))
    assert last.equal(made.is_last)
    assert copy.rows is not made.rows


def test_written_columns_are_split_and_others_are_left():
    batch, before = dialogues(), dialogues()
    with joined_rows(batch, {"logprobs": torch.ones(batch["turn"].shape)}) as (rows, outputs):
        assert outputs["logprobs"].equal(rows["response_mask"].float())
        rows["unit"], rows["other"] = torch.tensor([1, 2, 3]), rows["turn"] * 2
    assert batch["unit"].tolist() == [3, 1, 2, 3]
    assert batch["other"].equal(torch.where(batch["response_mask"], batch["turn"] * 2, 0))
    for name in ("turn", "response_mask", "scores", "trajectory"):
        assert batch[name].equal(before[name])


@pytest.mark.parametrize("column", [True, False], ids=["one row each", "no column"])
def test_one_row_a_trajectory_is_left_as_it_is(column):
    batch = whole() if column else whole().exclude("trajectory")
    assert trajectories_of(batch) is None
    with joined_rows(batch) as (rows, _):
        assert rows is batch


def step(algorithm, batch):
    """A batch after a step, with the gradient of the loss by the log-probabilities."""
    batch = batch.clone()
    balance = Balance(SINGLE_PROCESS, lambda rows: torch.ones(len(rows)), "unit", moves=True)
    context = StepContext({}, balance, start("cpu"), batch, 1.0, Metrics(), 1, 0)
    prepare_batch(algorithm, batch, context)
    prepare_mini_batch(algorithm, batch, {}, 0, context)
    logprobs = torch.zeros(batch["turn"].shape, requires_grad=True)
    batch["old_logprobs"] = logprobs.detach()
    total, _, statistics = algorithm.policy({"logprobs": logprobs}, batch, trajectories_of(batch))
    total.backward()
    assert all(len(number) == len(batch) for number in statistics.values())
    batch["gradient"] = logprobs.grad
    return batch


@pytest.mark.parametrize(
    "changes",
    [
        {"aggregation": {"name": "seq_mean_token_mean"}},
        {"aggregation": {"name": "group_mean"}, "advantage": {"name": "rloo"}},
        {"aggregation": {"name": "seq_mean_token_sum"}, "advantage": {"name": "group_norm", "scale": "batch"}},
        {"shaping": {"overlong": OVERLONG}, "advantage": {"name": "reinforce", "gamma": 0.5}},
        {"shaping": {"overlong": OVERLONG_EPISODE}, "advantage": {"name": "reinforce", "gamma": 0.5}},
        {"loss": {"name": "gmpo", "clip_low": 0.1, "clip_high": 0.1}, "aggregation": None},
        {"mask_tied": True},
        {"pick": "best"},
        {"mask_truncated": True},
    ],
)
def test_rows_of_a_trajectory_are_one(changes):
    algorithm = plain_algorithm(**REINFORCE | {"critic_loss": None} | changes)
    split = step(algorithm, dialogues(truncated=[True, False, False, False]))
    joined = step(algorithm, whole(truncated=[True, False, False]))
    names = [name for name in ("advantages", "loss_weights", "gradient") if name in joined.keys()]
    for trajectory in (3, 5, 7):
        for turn in (1, 2):
            found = []
            for batch in (split, joined):
                trains = (batch["trajectory"] == trajectory)[:, None] & (batch["turn"] == turn) & batch["response_mask"]
                found.append(torch.stack([batch[name][trains] for name in names]))
            assert found[0].equal(found[1])
    assert split["gradient"].any()
    assert split["unit_weights"].equal(joined["unit_weights"][[0, 1, 2, 0]])


def test_results_are_the_same_bits_where_a_trajectory_is_a_row():
    algorithm = plain_algorithm(**REINFORCE, critic_loss=None, advantage={"name": "group_norm", "scale": "group"})
    with_column, without = step(algorithm, whole()), step(algorithm, whole().exclude("trajectory"))
    for name in ("advantages", "loss_weights", "unit_weights", "loss_mask", "gradient"):
        assert with_column[name].equal(without[name])


def test_a_pair_is_made_of_two_trajectories():
    loss = {"name": "dpo", "beta": 0.1, "label_smoothing": 0.0}
    algorithm = plain_algorithm(
        loss=loss, critic_loss=None, aggregation=None, advantage=None, pick="best_and_worst", group_size=3
    )
    batch = dialogues()
    algorithm.build_loss_mask(batch)
    assert batch["loss_mask"].any(1).tolist() == [True, True, False, True]
    assert batch["chosen"].tolist() == [True, False, False, True]
    assert batch["unit"][[0, 1, 3]].tolist() == [7, 7, 7]
    assert algorithm.select_rows(batch, lambda value: [value], 0)["trajectory"].tolist() == [7, 3, 7]


def test_rejected_rows_leave_the_score_of_their_trajectory():
    """A trajectory is rejected where all of its rows are; here the second turn of 7 alone loses its tokens."""
    rule = Rule("ratio", "token", None, "mask", 0.5, 2.0, "any")
    algorithm = plain_algorithm(
        **REINFORCE, critic_loss=None, correction=CorrectionOptions("old", False, {"far": rule})
    )
    batch = dialogues()
    batch["old_logprobs"] = torch.zeros(batch["turn"].shape)
    batch["rollout_logprobs"] = torch.where(batch["turn"] == 2, 3.0, 0.0) * (batch["trajectory"] == 7)[:, None]
    algorithm.build_loss_mask(batch)
    algorithm.estimate_advantages(batch, alone, Metrics())
    assert batch["loss_mask"].any(1).tolist() == [False, True, True, True]
    assert not batch["rejected"].any()
    mean = 1.4 / 3
    assert batch["advantages"][3, 1].item() == pytest.approx(1 - mean)
    assert batch["advantages"][1, 1].item() == pytest.approx(-mean)
