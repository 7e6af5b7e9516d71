"""Rows that move between ranks: who moves them when, and whole runs, where two processes train what one trains."""

import json
from pathlib import Path

import pytest
import torch

from rft.actor.actor import Actor
from rft.batch.balance import Balance
from rft.setup.assembly import Job
from tests.conftest import TEACHER
from tests.train.checkpoint.states import state

pytestmark = pytest.mark.usefixtures("one_thread")
# Two updates a step, so that the second one sees what the first one did. AdamW with a large eps: with a small one the
# sign of a gradient that is nothing but rounding moves a weight.
GIVEN = ("steps=2", "warmup=none", "strategy.device=cpu", "batch.prompts=6", "batch.minibatches=2",
         "checkpoint.every=2", "actor.optimizer.lr=1e-2", "actor.optimizer.eps=1e-4", "actor.micro_batch_tokens=128",
         "rollout.max_new_tokens=12", "seed=1", "data.train.length=[2,9]", "data.eval.heldout.count=2")  # fmt: skip
RUNS = {
    "token_mean": ("algorithm=dapo", "algorithm/source=rollout"),
    "seq_mean_token_mean": ("algorithm=grpo", "algorithm/terms=[kl]"),
    "group_mean": ("algorithm=grpo", "algorithm/aggregation=group_mean", "algorithm.mask_truncated=true"),
    "units of groups": ("algorithm=gvpo", "batch.prompts=12"),
    "statistics of the mini-batch": ("algorithm=clip_cov", "algorithm.loss.share=0.2"),
    "a critic": ("algorithm=ppo", "batch.epochs=2"),
    "pairs": (
        "algorithm=dpo",
        "algorithm/terms=[chosen_nll]",
        "batch.prompts=24",
        "reference.precompute=true",
        "data.train.count=32",
    ),
    "mismatched rows, and a reference of its own that is asked ahead": (
        "algorithm=kto",
        "batch.prompts=24",
        "reference.precompute=true",
        f"reference.model_config={{{TEACHER}}}",
    ),
    "a step that is sampled, and one that is not": ("algorithm=gkd", "batch.prompts=24"),
    "shared prefixes": ("algorithm=grpo", "batch.prompts=12", "actor.share_prefix=true"),
}

STAYS = ("token_mean", "a critic", "pairs")  # also run on two ranks where rows stay, of which tests/e2e/ has more
WAYS = [*((name, "move") for name in RUNS), *((name, "stay") for name in STAYS)]


@pytest.fixture(scope="module")
def runs(resolved, sized, torchrun, tmp_path_factory):
    """Folders of every run: alone, on two ranks where rows stay, and on two ranks where they move."""
    folders = {name: tmp_path_factory.mktemp("runs") for name in RUNS}
    configs = []
    for name, overrides in RUNS.items():
        for way in ("alone", "stay", "move") if name in STAYS else ("alone", "move"):
            given = (*GIVEN, *overrides, f"batch.balance={str(way == 'move').lower()}")
            config = resolved(*sized(*given, f"output_dir={folders[name] / way}"))
            if way == "alone":
                Job(config).fit("")
            else:
                configs.append(config)
    file = tmp_path_factory.mktemp("configs") / "configs.json"
    file.write_text(json.dumps(configs))
    torchrun(Path(__file__).parent / "runs_on_ranks.py", file)
    return folders


def numbers(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()][1:]


def weights(folder):
    """Of every actor that trains, one long vector."""
    actors = state(folder)["actors"]
    networks = {key: saved["network"] for key, saved in actors.items() if "network" in saved}
    return {key: torch.cat([part.flatten() for part in network.values()]) for key, network in networks.items()}


def watch(monkeypatch, kind, part, calls):
    """Calls `part` as ever and notes what was handed in and what came of it."""
    whole = vars(kind)[part]

    def watching(self, *arguments, **named):
        result = whole(self, *arguments, **named)
        calls.append((part, self, arguments, result))
        return result

    monkeypatch.setattr(kind, part, watching)


def test_every_actor_trains_the_rows_that_come_back_from_the_balance(tiny, monkeypatch):
    """Also every pass without gradients is asked of the balance, and rows move once they have their weights."""
    calls = []
    monkeypatch.setattr(Balance, "rows", lambda self, batch, metrics: batch[batch["unit"].argsort(descending=True)][:5])
    for kind, part in ((Balance, "rows"), (Balance, "move"), (Actor, "compute_outputs"), (Actor, "update")):
        watch(monkeypatch, kind, part, calls)
    Job(tiny("algorithm=ppo", "algorithm/loss=clip_cov", "steps=1", "warmup=none", "batch.minibatches=2")).fit("")
    parts = [f"{self.key} {part}" if isinstance(self, Actor) else part for part, self, _, _ in calls]
    compute_columns = ["move", "actor compute_outputs", "move", "critic compute_outputs"]
    first, second = ["rows", "actor update", "critic update"], ["move", "actor compute_outputs"]
    assert parts == [*compute_columns, *first, *second, *first]
    for number, (part, _, arguments, result) in enumerate(calls):
        if part == "rows":
            assert {"loss_weights", "unit_weights", "cov_clipped"} <= set(arguments[0].keys())
            assert [calls[number + after][2][0] is result for after in (1, 2)] == [True, True]
            assert len(result) == 5


def test_groups_are_balanced_whole_where_they_share_a_prefix(tiny, monkeypatch):
    made = []
    monkeypatch.setattr("rft.setup.assembly.Balance", lambda *given: made.append(given) or Balance(*given))
    for share in ("true", "false"):
        Job(tiny("steps=1", "warmup=none", f"actor.share_prefix={share}", f"batch.balance={share}")).fit("")
    assert [(together, moves) for _, _, together, moves in made] == [("group", True), ("unit", False)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_two_processes_train_what_one_trains(name, way, runs):
    one, two = weights(runs[name] / "alone"), weights(runs[name] / way)
    assert one.keys() == two.keys()
    for actor, expected in one.items():
        torch.testing.assert_close(two[actor], expected, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(numbers(runs[name] / "alone"), numbers(runs[name] / way), strict=True):
        assert mine.keys() == theirs.keys()
        varies = ("stage", "balance/", "padding/", "time/", "throughput/", "memory/", "rollout/")
        for number in (number for number in mine if not number.startswith(varies)):
            assert theirs[number] == pytest.approx(mine[number], rel=1e-4, abs=1e-5), number
        assert mine["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_moving_rows_evens_the_work(name, runs):
    for alone, move in zip(*(numbers(runs[name] / way) for way in ("alone", "move")), strict=True):
        assert alone["balance/before"] == alone["balance/after"] == 1
        assert 1 <= move["balance/after"] < move["balance/before"] < 2
        assert move["balance/after"] < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("name", STAYS)
def test_rows_that_stay_have_the_work_from_before(name, runs):
    for stay, move in zip(*(numbers(runs[name] / way) for way in ("stay", "move")), strict=True):
        assert stay["balance/before"] == stay["balance/after"] == pytest.approx(move["balance/before"], rel=1e-3)
