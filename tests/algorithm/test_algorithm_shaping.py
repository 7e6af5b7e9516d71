"""What an algorithm remembers of scores, which rows they count, and the limit of advantages."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.metrics import Metrics
from tests.helpers import plain_algorithm

NORM = {"name": "running_norm", "center": True, "scale": False}
COSINE = {"name": "cosine_length", "term": "rihgt", "of": "answer", "max_tokens": 4, "right_short": 1.0}
COSINE |= {"right_long": 0.5, "wrong_short": -1.0, "wrong_long": -0.5, "at_limit": None}
PLAIN = {"name": "reinforce", "gamma": 1.0}


def alone(tensor):
    return tensor


def step(algorithm, scores, all_sum=alone, **columns):
    """The advantages of one step of rows with two trained tokens, all answers to one prompt, and its numbers."""
    keep = torch.tensor([[False, True, True]] * len(scores))
    batch = TensorDict(
        {"loss_mask": keep, "response_mask": keep, "group": torch.zeros(len(scores), dtype=torch.int64), **columns}
        | {"scores": torch.tensor(scores)},
        batch_size=[len(scores)],
    )
    metrics = Metrics()
    algorithm.estimate_advantages(batch, all_sum, metrics)
    return batch["advantages"][:, 1].tolist(), metrics.reduce(lambda mine: [mine])


def test_running_moments_go_on_from_step_to_step_and_are_logged():
    algorithm = plain_algorithm(advantage=PLAIN, shaping={"norm": NORM})
    found, numbers = step(algorithm, [1.0, 0.0])
    assert found == [0.5, -0.5]
    assert numbers == {"reward/shaped": 0, "shaping/norm/mean": 0.5, "shaping/norm/std": pytest.approx(0.5**0.5)}
    found, numbers = step(algorithm, [4.0, 3.0])
    assert found == [2.0, 1.0]
    expected = {"reward/shaped": 1.5, "shaping/norm/mean": 2.0, "shaping/norm/std": pytest.approx(math.sqrt(10 / 3))}
    assert numbers == expected


def test_each_shaping_remembers_for_itself():
    nodes = {"first": NORM, "limit": {"name": "clip_scores", "low": 0.0, "high": 9.0}, "second": NORM}
    _, numbers = step(plain_algorithm(advantage=PLAIN, shaping=nodes), [1.0, 0.0])
    assert {name: numbers[f"shaping/{name}/mean"] for name in ("first", "second")} == {"first": 0.5, "second": 0.25}


def test_what_shapings_remember_comes_back():
    def build():
        return plain_algorithm(advantage=PLAIN, shaping={"norm": NORM | {"scale": True}, "again": NORM})

    algorithm, other = build(), build()
    step(algorithm, [0.1, 0.7, 0.2])
    other.load_state_dict(algorithm.state_dict())
    assert step(other, [0.3, 0.9]) == step(algorithm, [0.3, 0.9])
    assert other.state_dict() == algorithm.state_dict()
    assert step(build(), [0.3, 0.9]) != step(algorithm, [0.3, 0.9])


def test_rejected_rows_and_rows_without_a_score_are_in_no_moment():
    algorithm = plain_algorithm(advantage=PLAIN, shaping={"norm": NORM})
    rejected = torch.tensor([False, True, False, False])
    found, numbers = step(algorithm, [1.0, 100.0, 2.0, torch.nan], rejected=rejected)
    assert found == [-0.5, 0.0, 0.5, 0.0]
    assert numbers["shaping/norm/mean"] == 1.5 and numbers["reward/shaped"] == 0


def test_rows_of_masked_tied_groups_are_in_no_moment():
    algorithm = plain_algorithm(advantage=PLAIN, shaping={"norm": NORM}, mask_tied=True)
    found, _ = step(algorithm, [5.0, 5.0, 1.0, 2.0], group=torch.tensor([1, 1, 0, 0]))
    assert found == [0.0, 0.0, -0.5, 0.5]


def test_moments_are_over_all_ranks(ranks):
    scores = [[1.0], [0.0, 5.0, torch.nan], [torch.nan]]

    def run(world):
        algorithm = plain_algorithm(advantage=PLAIN, shaping={"norm": NORM})
        return step(algorithm, scores[world.rank], world.all_sum)[0], algorithm.state_dict()

    found = ranks(3, run)
    assert [advantages for advantages, _ in found] == [[-1.0], [-2.0, 3.0, 0.0], [0.0]]
    assert all(state == found[0][1] for _, state in found)


def test_advantages_are_limited_after_the_baseline():
    found, numbers = step(plain_algorithm(advantage_clip=1.5), [0.0, 1.0, 5.0])
    assert found == [-1.5, -1.0, 1.5]  # -2, -1, 3
    assert numbers == {"clip/advantage": pytest.approx(2 / 3)}
    found, numbers = step(plain_algorithm(advantage_clip=3.0), [0.0, 1.0, 5.0])
    assert found == [-2.0, -1.0, 3.0] and numbers == {"clip/advantage": 0}
    assert step(plain_algorithm(), [0.0, 1.0, 5.0])[1] == {}


def test_the_returns_of_the_critic_have_no_limit():
    gae = {"name": "gae", "gamma": 1.0, "lam": 1.0, "whiten": False}
    algorithm = plain_algorithm(advantage=gae, critic_loss={"name": "value", "clip": None}, advantage_clip=1.0)
    keep = torch.tensor([[False, True, True]])
    batch = TensorDict({"loss_mask": keep, "scores": torch.tensor([4.0]), "values": torch.ones(1, 3)}, batch_size=[1])
    algorithm.estimate_advantages(batch, alone, Metrics())
    assert batch["advantages"].tolist() == [[0.0, 1.0, 1.0]]
    assert batch["returns"].tolist() == [[0.0, 4.0, 4.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"advantage": None, "loss": {"name": "nll"}, "advantage_clip": 1.0},
            r"^algorithm\.advantage_clip limits advantages, and algorithm\.advantage=none; set it to null$",
        ),
        (
            {"shaping": {"cosine": COSINE}},
            r"^algorithm\.shaping\.cosine\.term=rihgt: none of reward\.terms, which are right, .*did you mean right",
        ),
    ],
)
def test_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        plain_algorithm({"right": 1.0, "form": 0.5}, **changes)


def test_a_limit_that_nothing_reads_is_named():
    algorithm = plain_algorithm(loss={"name": "nll"}, advantage_clip=1.0)
    assert algorithm.unread()["advantage_clip"] == "the loss 'nll' reads no advantages"
