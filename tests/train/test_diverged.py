"""Updates that are not finite: what stops the run, what is skipped and counted, and the rows that are saved."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tensordict import LazyStackedTensorDict, TensorDict

from rft.actor.base import NonFiniteError
from rft.algorithm.scores.shaping import SHAPINGS
from rft.logger.log import SilentLog
from rft.metrics import Metrics
from rft.setup.assembly import Job
from rft.train import trainer as trainer_module
from rft.train.diverged import FaultOptions, nonfinite_policy, nonfinite_weight, save_rows
from rft.train.trainer import Trainer
from tests.helpers import Interrupted, identical, interrupt, numbers
from tests.train import skips_on_ranks
from tests.train.checkpoint.states import state

pytestmark = pytest.mark.usefixtures("one_thread")


class Warnings(SilentLog):
    def __init__(self):
        self.texts = []

    def warning(self, text):
        self.texts.append(text)


def make_policy(run, rank=0, **changes):
    plain = {
        "nonfinite": "skip",
        "max_skipped": 2,
        "saved_updates": 1,
        "dead_after_s": 1.0,
        "collective_timeout_s": 1.0,
    }
    world = changes.pop("world", SimpleNamespace(rank=rank, gather=lambda part: [part]))
    options = FaultOptions(**plain | changes)
    return nonfinite_policy(options)(options, run, world, Warnings())


def make_problem(key="actor", suspects=None, units=(5, 6)):
    """An error of rows of these units, each with one token that trains."""
    advantages = torch.tensor([[0.0, math.nan], *[[1.0, 2.0]] * (len(units) - 1)])
    mask = torch.tensor([[False, True]] * len(units))
    columns = {"advantages": advantages, "unit": torch.tensor(units), "loss_mask": mask}
    batch = TensorDict(columns, batch_size=[len(units)])
    return NonFiniteError(key, {"advantages": [0]} if suspects is None else suspects, batch)


def spoil(policy, step, key="actor", metrics=None, **problem):
    def update(dropped):
        raise make_problem(key, **problem)

    policy.take(step, key, metrics or Metrics(), update)


def apply(policy, step, key="actor", metrics=None):
    policy.take(step, key, metrics or Metrics(), lambda dropped: None)


def test_stop_saves_the_rows_and_names_columns_rows_and_cures(tmp_path):
    policy = make_policy(tmp_path, rank=1, nonfinite="stop")
    with pytest.raises(ValueError) as caught:
        spoil(policy, 12, "critic", suspects={"advantages": [0], "values": list(range(40))})
    path = tmp_path / "diverged" / "step_00000012_critic_1_rank_1.safetensors"
    for part in (
        "step 12: the loss or the gradient of the critic is not finite. ",
        f"on rank 1: column 'advantages' in rows [0]; column 'values' in rows {list(range(16))}.",
        str(path),
        "critic.optimizer.lr",
        "faults.nonfinite=skip",
    ):
        assert part in str(caught.value)
    assert load_file(path)["advantages"].isnan().tolist() == [[False, True], [False, False]]


def test_a_rank_without_a_suspect_says_so(tmp_path):
    with pytest.raises(ValueError, match="none of its columns"):
        spoil(make_policy(tmp_path, nonfinite="stop"), 1, suspects={})


def test_skipped_updates_are_counted_by_step_and_in_a_row_for_each_model(tmp_path):
    policy, found = make_policy(tmp_path, saved_updates=9), []
    for step, calls in enumerate([[spoil, apply], [spoil], [spoil], [apply]], start=1):
        metrics = Metrics()
        for call in calls:
            call(policy, step)
        apply(policy, step, "critic")
        policy.record(metrics)
        found.append(metrics.reduce(lambda part: [part, part]))  # two ranks
    names = [f"{prefix}faults/{name}" for prefix in ("", "critic/") for name in ("skipped_updates", "skipped_in_a_row")]
    assert [[row[name] for name in names] for row in found] == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 2, 0, 0], [0, 0, 0, 0]]


def test_one_more_than_max_skipped_in_a_row_stops_a_resumed_run_too(tmp_path):
    policy = make_policy(tmp_path, saved_updates=0)
    spoil(policy, 1), spoil(policy, 2), apply(policy, 3), spoil(policy, 4, "critic"), spoil(policy, 5)
    resumed = make_policy(tmp_path, saved_updates=0)
    resumed.load_state_dict(policy.state_dict())
    spoil(resumed, 6)
    assert not (tmp_path / "diverged").exists()
    with pytest.raises(ValueError, match=r"^step 7: .* finite; faults\.max_skipped=2 updates before it are skipped\."):
        spoil(resumed, 7)
    assert len(list((tmp_path / "diverged").glob("*.safetensors"))) == 1, "the rows that stop the run are saved"
    spoil(resumed, 7, "critic")


def test_rows_are_saved_of_the_first_skipped_updates_alone(tmp_path):
    policy = make_policy(tmp_path, saved_updates=2, max_skipped=9)
    spoil(policy, 1), spoil(policy, 1), spoil(policy, 2)
    saved = sorted(path.name for path in (tmp_path / "diverged").iterdir())
    assert saved == [f"step_00000001_actor_{n}_rank_0.{end}" for n in (1, 2) for end in ("json", "safetensors")]
    assert len(policy._log.texts) == 2 and policy._log.texts[0].startswith("step 1: an update of the actor is skipped")


def test_rows_that_cannot_be_saved_are_a_warning(tmp_path):
    (tmp_path / "diverged").write_text("no folder")
    policy = make_policy(tmp_path, saved_updates=2)
    spoil(policy, 1)
    assert policy._log.texts[0].startswith(f"saving the rows in {tmp_path}/diverged/step_00000001_actor_1_rank_0.safet")
    assert len(policy._log.texts) == 2, "the update is skipped"


def test_other_errors_pass_and_numbers_of_a_finite_update_stay(tmp_path):
    policy, metrics = make_policy(tmp_path), Metrics()
    metrics.add("loss/nll", 1.0)
    with pytest.raises(KeyError):
        policy.take(1, "actor", metrics, lambda dropped: {}["loss"])
    policy.take(1, "actor", metrics, lambda dropped: metrics.add("loss/nll", 3.0))

    def spoilt(dropped):
        metrics.add("loss/nll", math.nan)
        raise make_problem()

    policy.take(1, "actor", metrics, spoilt)
    assert metrics.reduce(lambda part: [part]) == {"loss/nll": 2.0}


def test_files_hold_every_column_without_pickle(tmp_path):
    media = LazyStackedTensorDict(TensorDict({"pixels": torch.ones(3)}, []), TensorDict({}, []))
    tokens = TensorDict({"input_ids": torch.tensor([[1, 2], [3, 4]]).t()}, batch_size=[2])  # not contiguous
    batch = TensorDict({"tokens": tokens, "loss_mask": torch.tensor([[True, False]] * 2)}, batch_size=[2])
    batch["shared"] = batch["loss_mask"]  # of the same storage
    batch["media"] = media
    rows = [{"prompt": "1=", "by": b"x"}, {"prompt": "2=", "score": math.inf}]
    batch.set_non_tensor("fields", rows[0])
    batch["fields"] = torch.stack([TensorDict({}, []).set_non_tensor("fields", row) for row in rows]).get("fields")
    save_rows(tmp_path / "a" / "rows.safetensors", NonFiniteError("actor", {"values": [1]}, batch))
    saved = load_file(tmp_path / "a" / "rows.safetensors")
    assert {name: column.tolist() for name, column in saved.items()} == {
        "tokens.input_ids": [[1, 3], [2, 4]],
        "loss_mask": [[True, False]] * 2,
        "shared": [[True, False]] * 2,
        "media.0.pixels": [1.0, 1.0, 1.0],
    }
    facts = json.loads((tmp_path / "a" / "rows.json").read_text())
    assert facts == {
        "model": "actor",
        "suspects": {"values": [1]},
        "fields": [{"prompt": "1=", "by": "b'x'"}, {"prompt": "2=", "score": math.inf}],
    }


def test_a_weight_that_is_not_finite_names_the_last_checkpoint(tmp_path):
    assert str(nonfinite_weight(0, "actor", "w", None)).startswith("actor.path: the weight w is not finite as it was")
    assert str(nonfinite_weight(1, "actor", "w", None)).endswith("there is none before it")
    text = str(nonfinite_weight(2, "actor", "w", tmp_path))
    assert text.startswith("step 2: the weight w of the actor is not finite after the update. Likely causes: actor.opt")
    assert text.endswith(str(tmp_path))


SKIP = ("faults.nonfinite=skip", "steps=3", "warmup=none", "batch.minibatches=2", "checkpoint.every=1",
        "checkpoint.keep_last=9", "algorithm/terms=[kl_adaptive]", "algorithm.terms.kl.coef.horizon=50")  # fmt: skip


@pytest.fixture
def config(tiny):
    """The config of a run with updates that are not finite."""

    def make(folder, *overrides, versions=(1,)):
        made = tiny("strategy.device=cpu", *SKIP, *overrides) | {"output_dir": str(folder)}
        made["algorithm"]["loss"] = {"name": "spoilt_updates", "versions": list(versions)}
        return made

    return make


@pytest.mark.parametrize("policy", ["skip", "drop_rows"])
def test_a_score_that_is_not_finite_after_shaping_stops_with_every_policy(policy, tiny, monkeypatch):
    """No update has begun that could be dropped, and the rows of a group are compared with this score."""
    spoilt = lambda scores, batch: scores / (torch.arange(len(scores)) != 1)  # noqa: E731
    monkeypatch.setitem(SHAPINGS._entries, "spoilt_scores", (spoilt, {}))
    config = tiny("warmup=none", "steps=1", "eval.every=0", f"faults.nonfinite={policy}")
    config["algorithm"]["shaping"] = {"spoilt": {"name": "spoilt_scores"}}
    with pytest.raises(ValueError, match=r"rows \[1\] are not finite after algorithm\.shaping \(spoilt_scores\)"):
        Job(config).fit("")


def check_equal(skipped, without):
    """The first run differs from the second in the count of its skipped updates alone."""
    assert [row.get("faults/skipped_updates") for row in numbers(skipped)] == [None, 0, 1, 0]
    counts = {"faults/skipped_updates": 0, "faults/skipped_in_a_row": 0}
    assert [row | counts for row in numbers(skipped)] == [row | counts for row in numbers(without)]
    saved, expected = state(skipped), state(without)
    for one in (saved, expected):
        del one["numbers"]
    assert identical(saved, expected)


@pytest.mark.parametrize("tokens", [64, pytest.param(4096, marks=pytest.mark.slow)])
def test_a_run_that_skips_equals_one_in_which_the_update_never_was(tokens, config, tmp_path, monkeypatch):
    given = (f"actor.micro_batch_tokens={tokens}", "checkpoint.every=0")
    Job(config(tmp_path / "skipped", *given)).fit("")
    monkeypatch.setattr(Trainer, "minimise", skips_on_ranks.without_spoilt(Trainer.minimise))
    monkeypatch.setattr(skips_on_ranks, "CALLS", calls := [])
    Job(config(tmp_path / "without", *given)).fit("")
    assert sum(calls) == 1 and len(calls) == 6
    check_equal(tmp_path / "skipped", tmp_path / "without")


@pytest.mark.slow
def test_two_ranks_skip_the_update_in_which_one_of_them_has_the_row(config, tmp_path, torchrun):
    configs = [config(tmp_path / name, "actor.micro_batch_tokens=64") for name in ("skipped", "without")]
    (tmp_path / "configs.json").write_text(json.dumps(configs))
    torchrun(Path(skips_on_ranks.__file__), tmp_path / "configs.json")
    check_equal(tmp_path / "skipped", tmp_path / "without")
    saved = sorted(path.name for path in (tmp_path / "skipped" / "diverged").glob("*.safetensors"))
    assert saved == [f"step_00000002_actor_1_rank_{rank}.safetensors" for rank in (0, 1)]
    suspects = [json.loads(path.read_text())["suspects"] for path in (tmp_path / "skipped" / "diverged").glob("*.json")]
    assert sorted(map(len, suspects)) == [0, 1], "only one rank has the row"


@pytest.mark.slow
def test_a_resumed_run_skips_the_same_updates(config, tmp_path, monkeypatch):
    given = {"versions": (1, 2, 3)}
    Job(config(tmp_path / "whole", "steps=4", **given)).fit("")
    with monkeypatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(Interrupted):
            Job(config(tmp_path / "run", "steps=4", **given)).fit("")
    Job(config(tmp_path / "run", "steps=4", **given)).fit("")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert identical(state(tmp_path / "run")["actors"], state(tmp_path / "whole")["actors"])


# Rows that are dropped


def drop(policy, key="actor", again=None, **problem):
    """Takes an update that is not finite, and again if `again` has suspects; returns the units of each attempt."""
    attempts, metrics = [], Metrics()

    def update(dropped):
        attempts.append(dropped)
        metrics.add("loss/nll", len(attempts))
        if not dropped:
            raise make_problem(key, **problem)
        if again is not None:
            raise make_problem(key, again)

    policy.take(1, key, metrics, update)
    policy.record(metrics)
    return attempts, metrics.reduce(lambda part: [part])


def test_an_update_is_taken_again_without_the_units_that_are_not_finite(tmp_path):
    policy = make_policy(tmp_path, nonfinite="drop_rows")
    attempts, found = drop(policy, "critic", units=(4, 5, 5, 6), suspects={"advantages": [0], "loss/value": [1]})
    assert attempts == [[], [4, 5]]
    assert found == {
        "loss/nll": 2.0,
        "critic/faults/skipped_updates": 0,
        "critic/faults/skipped_in_a_row": 0,
        "critic/faults/dropped_rows": 3,
        "critic/faults/dropped_tokens": 3,
    }
    assert load_file(tmp_path / "diverged" / "step_00000001_critic_1_rank_0.safetensors")["unit"].tolist() == [
        4,
        5,
        5,
        6,
    ]
    warning = policy._log.texts[0]
    assert warning.startswith("step 1: 3 rows of rank 0 are dropped from an update of the critic, because its loss or")


@pytest.mark.parametrize(
    ("suspects", "again", "attempts"),
    [
        ({}, None, [[]]),
        ({"advantages": [0, 1]}, None, [[]]),
        ({"advantages": [0], "loss/nll": [1]}, None, [[]]),
        ({"advantages": [0]}, {}, [[], [5]]),
    ],
    ids=["no row is known", "a column of all rows", "no row would be left", "not finite again"],
)
def test_an_update_that_no_row_explains_is_skipped(suspects, again, attempts, tmp_path):
    policy = make_policy(tmp_path, nonfinite="drop_rows")
    found, counts = drop(policy, suspects=suspects, again=again)
    assert found == attempts
    assert [counts[f"faults/{name}"] for name in ("skipped_updates", "dropped_rows", "dropped_tokens")] == [1, 0, 0]
    assert policy.dropped_units("actor", 1) == [] and "loss/nll" not in counts
    drop(policy, suspects={}), drop(policy, suspects={"advantages": [0]})
    assert policy.state_dict() == {"actor": 0}, "an update without some rows is no skipped one"


def test_all_ranks_drop_the_rows_of_one(ranks, tmp_path):
    """A statistic of the mini-batch, NaN on all ranks by a row of one of them, does not name a row as the cause."""

    def work(world):
        everywhere = {"kl_baseline": [0, 1]}
        problem = [{"suspects": everywhere | {"logprobs": [1]}}, {"suspects": everywhere, "units": (7, 8)}][world.rank]
        return drop(make_policy(tmp_path, world=world, nonfinite="drop_rows"), **problem)

    found = ranks(2, work)
    assert [attempts for attempts, _ in found] == [[[], [6]]] * 2
    assert [counts["faults/dropped_rows"] for _, counts in found] == [1, 0]


def test_units_that_every_epoch_has_dropped_are_known_until_the_step_ends(tmp_path):
    policy = make_policy(tmp_path, nonfinite="drop_rows")
    for rows in ([0], [0], [1]):
        drop(policy, suspects={"advantages": rows})
    drop(policy, "critic", suspects={"advantages": [1]})
    assert policy.dropped_units("actor", 2) == [5]
    assert policy.dropped_units("actor", 1) == []


def drop_balance(row):
    return {name: number for name, number in row.items() if not name.startswith("balance/")}


def check_dropped(dropped, without):
    """The first run differs from the second in the counts of its dropped rows, and in the work before it drops them."""
    rows, others = ([drop_balance(row) for row in numbers(run)] for run in (dropped, without))
    counted = [[row.pop(f"faults/dropped_{name}", None) for name in ("rows", "tokens")] for row in rows]
    assert counted[:2] == [[None, None], [0, 0]] and counted[3:] == [[0, 0]]
    assert counted[2][0] == 1 and counted[2][1] > 0
    for row in others[1:]:
        assert row.pop("faults/dropped_rows") == row.pop("faults/dropped_tokens") == 0
    assert rows == others
    saved, expected = state(dropped), state(without)
    for one in (saved, expected):
        del one["numbers"]
    assert identical(saved, expected)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [64, pytest.param(4096, marks=pytest.mark.slow)])
def test_a_run_that_drops_a_row_equals_one_in_which_it_never_was(tokens, config, tmp_path, monkeypatch):
    given = ("faults.nonfinite=drop_rows", f"actor.micro_batch_tokens={tokens}", "checkpoint.every=0")
    Job(config(tmp_path / "dropped", *given)).fit("")
    monkeypatch.setattr(skips_on_ranks, "CALLS", [])
    without = skips_on_ranks.without_spoilt_rows(trainer_module.mini_batches)
    monkeypatch.setattr(trainer_module, "mini_batches", without)
    Job(config(tmp_path / "without", *given)).fit("")
    check_dropped(tmp_path / "dropped", tmp_path / "without")


@pytest.mark.slow
def test_two_ranks_drop_the_row_that_one_of_them_has(config, tmp_path, torchrun):
    given = ("faults.nonfinite=drop_rows", "actor.micro_batch_tokens=64")
    configs = [config(tmp_path / name, *given) for name in ("dropped", "without")]
    (tmp_path / "configs.json").write_text(json.dumps(configs))
    torchrun(Path(skips_on_ranks.__file__), tmp_path / "configs.json")
    check_dropped(tmp_path / "dropped", tmp_path / "without")


@pytest.mark.slow
def test_the_critic_drops_a_row_on_which_the_policy_trains(tiny, tmp_path):
    given = ("faults.nonfinite=drop_rows", "algorithm=ppo", "steps=3", "warmup=none", "batch.minibatches=2")
    made = tiny(*given, "actor.micro_batch_tokens=64", "critic.micro_batch_tokens=64")
    made["algorithm"]["critic_loss"] = {"name": "spoilt_values"}
    Job(made).fit("")
    names = [f"{prefix}faults/{name}" for prefix in ("", "critic/") for name in ("dropped_rows", "skipped_updates")]
    rows = numbers(tmp_path / "run")[1:]
    assert [[row[name] for name in names] for row in rows] == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert all(math.isfinite(row["critic/grad_norm"]) and row["loss/spoilt_values"] > 0 for row in rows)
