"""A run that is killed at any moment and continued by the same command ends as the run that was not killed."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import rft
from tests.conftest import ENDS_S
from tests.e2e.kills import contents

SCRIPT = Path(__file__).parent / "kills.py"
# One step of warm-up and three of training with checkpoints after steps 1, 2 and 4; groups wait in the source, the
# coefficient of a KL adapts, and there is a reference model.
RUN = ("algorithm=dapo", "algorithm.source.redraw.max_rounds=6", "seed=1", "algorithm/terms=[kl_adaptive]",
       "algorithm.terms.kl.coef.horizon=50", "warmup.steps=1", "steps=3", "checkpoint.every=2",
       "checkpoint.keep_last=1", "eval.every=1", "trajectories.every=1", "strategy.device=cpu")  # fmt: skip
TRAINER, CHECKPOINTS, LOG = "rft.train.trainer", "rft.train.checkpoint.checkpoints", "rft.logger.log"
# Where a process is killed, and the last step that it has logged then: module, function, call, before or after it.
PHASES = {
    "the rows are loaded": (("rft.setup.assembly", "Job.prepare", 1, "after"), -1),
    "before the config": (("rft.train.folder.run_folder", "_write_config", 1, "before"), -1),
    "within the config": (("os", "fsync", 2, "before"), -1),
    "after the config": (("rft.train.folder.run_folder", "_write_config", 1, "after"), -1),
    "the models are loaded": (("rft.setup.assembly", "Job.assemble", 1, "after"), -1),
    "the evaluation at the start": ((TRAINER, "Trainer.evaluate", 1, "after"), -1),
    "after the first log": ((LOG, "RunLog.log", 1, "after"), 0),
    "in the warm-up": ((TRAINER, "Trainer.update", 1, "after"), 0),
    "publishing weights": (("rft.rollout.sampler", "EngineSampler.publish", 6, "after"), 2),
    "before sampling": (("rft.rollout.sampler", "EngineSampler.generate", 5, "before"), 2),
    "after sampling": (("rft.rollout.sampler", "EngineSampler.generate", 5, "after"), 2),
    "before scoring": (("rft.reward.compose", "SumScoring.finish", 5, "before"), 2),
    "after scoring": (("rft.reward.compose", "SumScoring.finish", 5, "after"), 2),
    "dynamic sampling": (("rft.rollout.source.dynamic_sampling", "draw_until_full", 2, "after"), 2),
    "columns": ((TRAINER, "Trainer.compute_columns", 3, "after"), 2),
    "the forward pass": (("rft.actor.actor", "Actor._micro_step", 3, "after"), 2),
    "the backward pass": (("rft.strategy.fsdp2", "FSDP2.backward", 3, "after"), 2),
    "before the optimizer step": (("rft.actor.optim.optimizer", "AdamW.step", 3, "before"), 2),
    "after the optimizer step": (("rft.actor.optim.optimizer", "AdamW.step", 3, "after"), 2),
    "the check of the weights": ((TRAINER, "Trainer.check_weights", 4, "after"), 2),
    "publish": ((TRAINER, "Trainer.publish", 4, "after"), 2),
    "the coefficient": (("rft.algorithm.algorithm", "Algorithm.update_controllers", 3, "after"), 2),
    "the ledger": (("rft.train.ledger", "Ledger.record", 3, "after"), 2),
    "before the evaluation": ((TRAINER, "Trainer.evaluate", 4, "before"), 2),
    "after the evaluation": ((TRAINER, "Trainer.evaluate", 4, "after"), 2),
    "before the log": ((LOG, "RunLog.log", 4, "before"), 2),
    "after the log": ((LOG, "RunLog.log", 4, "after"), 3),
    "the texts": ((LOG, "RunLog.samples", 4, "after"), 3),
    "before the worst tokens": ((LOG, "RunLog.worst_tokens", 4, "before"), 4),
    "after the worst tokens": ((LOG, "RunLog.worst_tokens", 4, "after"), 4),
    "before a save": ((TRAINER, "Trainer.save", 2, "before"), 2),
    "the export": (("rft.actor.actor", "Actor.save_model", 2, "after"), 2),
    "the copy to the CPU": ((CHECKPOINTS, "Checkpoints._stage", 2, "after"), 2),
    "while the thread writes": ((TRAINER, "Trainer.save", 2, "after"), 2),
    "the files of tensors": ((CHECKPOINTS, "save_tensors", 3, "after"), 4),
    "before the manifest": ((CHECKPOINTS, "write_manifest", 3, "before"), 4),
    "after the manifest": ((CHECKPOINTS, "write_manifest", 3, "after"), 4),
    "before the link": ((CHECKPOINTS, "Checkpoints._link", 3, "before"), 4),
    "after the link": ((CHECKPOINTS, "Checkpoints._link", 3, "after"), 4),
    "before the last prune": ((CHECKPOINTS, "remove", 2, "before"), 4),
    "the end of the last save": ((CHECKPOINTS, "Checkpoints.end", 1, "after"), 4),
    "before the report": ((LOG, "RunLog.close", 1, "before"), 4),
    "before the result": (("rft.setup.assembly", "finish_folder", 1, "before"), 4),
    "after the result": (("rft.setup.assembly", "finish_folder", 1, "after"), 4),
}
# Where the second process is killed, after the first one was killed in step 4.
RESUMING = {
    "the folder": ("rft.train.folder.run_folder", "_continue", 1, "after"),
    "the lock": ("rft.train.folder.run_lock", "RunLock.take", 1, "after"),
    "what a kill left": (CHECKPOINTS, "Checkpoints._clear", 1, "after"),
    "the choice of the checkpoint": (CHECKPOINTS, "Checkpoints.read", 1, "after"),
    "before the metrics are cut": (LOG, "RunLog.rewind", 1, "before"),
    "after the metrics are cut": (LOG, "RunLog.rewind", 1, "after"),
    "the weights": (CHECKPOINTS, "SavedState.fill", 1, "after"),
    "the source": ("rft.rollout.source.rollout", "RolloutSource.load_state_dict", 1, "after"),
    "the same place": (TRAINER, "Trainer.update", 2, "after"),
}
AFTER_CHECKPOINT_2 = (CHECKPOINTS, "Checkpoints._complete", 2, "after")  # of step 2, which has a state of the source


@pytest.fixture(scope="module")
def outcomes(sized, resolved, tmp_path_factory):
    """Runs the trials in the script; returns what it found of each."""

    def run(trials):
        folder = tmp_path_factory.mktemp("kills")
        (folder / "config.json").write_text(json.dumps(resolved(*sized("output_dir=run", *RUN))))
        (folder / "trials.json").write_text(json.dumps(trials))
        environment = os.environ | {"PYTHONPATH": str(Path(rft.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(folder)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((folder / "outcomes.json").read_text())

    return run


@pytest.mark.slow
def test_a_kill_in_any_phase_of_a_step_loses_nothing(outcomes):
    found = dict(zip(PHASES, outcomes([[place] for place, _ in PHASES.values()]), strict=True))
    assert found == {name: {"steps": [step], "different": []} for name, (_, step) in PHASES.items()}


@pytest.mark.slow
def test_a_kill_while_a_killed_run_resumes_loses_nothing(outcomes):
    found = dict(zip(RESUMING, outcomes([[AFTER_CHECKPOINT_2, place] for place in RESUMING.values()]), strict=True))
    assert [name for name, outcome in found.items() if outcome["different"]] == []
    assert all(None not in outcome["steps"] for outcome in found.values())


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(outcomes):
    """RFT_RANDOM_KILLS=200 makes 200 of them. Every second run is killed twice."""
    count, draw = int(os.environ.get("RFT_RANDOM_KILLS", "6")), random.Random(17)
    trials = []
    while (left := count - sum(map(len, trials))) > 0:
        trials.append([draw.random() for _ in range(min(left, 1 + len(trials) % 2))])
    found = outcomes(trials)
    assert [outcome["different"] for outcome in found] == [[]] * len(trials)
    steps = [step for outcome in found for step in outcome["steps"]]
    assert steps.count(None) < count / 2 and len({*steps} - {None}) > 1, "most kills come before the end, in some steps"


@pytest.mark.slow
def test_a_rank_of_two_that_is_killed_in_a_save_loses_nothing(sized, resolved, tmp_path):
    """It has written its tensors of the checkpoint of step 2, and rank 0 waits to seal it. torchrun restarts both."""
    config = resolved(*sized("output_dir=run", *RUN, "checkpoint.every=1"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = os.environ | {"PYTHONPATH": str(Path(rft.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(SCRIPT.with_name("killed_rank.py")), "."]

    def run(*kill):
        given = [*command, *map(json.dumps, kill)]
        done = subprocess.run(given, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=ENDS_S)
        return done.returncode, done.stdout + done.stderr

    code, said = run()
    assert code == 0, said
    whole = (tmp_path / "run").rename(tmp_path / "whole")
    code, said = run((CHECKPOINTS, "save_tensors", 2, "after"))
    assert code == 0 and "rank 1 failed first: its process ended without an error message" in said, said
    assert "continues from step 1 of" in said, said
    found, expected = contents(tmp_path / "run"), contents(whole)
    assert [name for name in {**expected, **found} if expected.get(name, "") != found.get(name, "")] == []
