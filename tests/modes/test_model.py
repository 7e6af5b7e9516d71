"""Which weights answer."""

import json
from pathlib import Path

import pytest

from rft.modes.model import Answering, find_checkpoint
from rft.train.checkpoint.manifest import write_manifest


@pytest.fixture
def run(tmp_path):
    """A run folder with checkpoints of these steps and metrics."""

    def make(metrics, watched="eval/heldout/accuracy"):
        (tmp_path / "config.yaml").write_text(f"metric: {watched}")
        for step, metric in metrics.items():
            folder = tmp_path / "checkpoints" / f"step_{step:08d}"
            (folder / "actor").mkdir(parents=True)
            write_manifest(folder, {}, {"step": step, "metric": metric})
        return tmp_path

    return make


def found(folder, which):
    model = find_checkpoint(folder, which, "evaluate.checkpoint")
    return model and str(model.relative_to(folder))


def test_checkpoints_are_found(run):
    folder = run({2: 0.5, 10: 0.9, 100: 0.9, 200: 0.1, 300: None})
    assert found(folder, "latest") == "checkpoints/step_00000300/actor"
    assert found(folder, "best") == "checkpoints/step_00000100/actor", "of equal ones the newest"
    assert found(folder, 2) == "checkpoints/step_00000002/actor"
    assert found(folder, None) is None


@pytest.mark.parametrize("watched", ["eval/heldout/loss", "eval/heldout/perplexity", "loss/dpo"])
def test_the_best_checkpoint_of_a_loss_has_the_lowest(watched, run):
    assert found(run({2: 0.5, 10: 0.1, 100: 0.1, 200: 0.9}, watched), "best") == "checkpoints/step_00000100/actor"


def test_no_run_is_the_model_that_actor_names(tmp_path):
    assert found(tmp_path, "latest") is None and found(tmp_path / "nowhere", "latest") is None


@pytest.mark.parametrize(
    ("metrics", "which", "message"),
    [
        ({}, "latest", "evaluate.checkpoint=latest: the run in output_dir=.* has no checkpoint yet; .*=null for the"),
        ({2: None}, "best", "evaluate.checkpoint=best: none of the checkpoints of .* was evaluated; .* or one of 2"),
        (
            {2: 1.0, 10: 1.0},
            3,
            "evaluate.checkpoint=3: .* has no checkpoint of this step; its checkpoints are .* 2, 10",
        ),
    ],
)
def test_a_checkpoint_that_there_is_not(metrics, which, message, run):
    with pytest.raises(ValueError, match=message):
        found(run(metrics), which)


def test_a_step_of_one_that_is_being_written_is_none(run):
    folder = run({2: 1.0})
    (folder / "checkpoints" / ".step_00000003.partial").mkdir()
    assert found(folder, "latest") == "checkpoints/step_00000002/actor"


def test_a_model_that_writes_no_text(resolved):
    job = Answering(resolved("algorithm=reward_model", "mode=generate"))
    with pytest.raises(ValueError, match="mode=generate: rollout=none cannot sample; choose another"):
        job.find("latest", "generate.checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["generate", "evaluate", "doctor", "replay"])
def test_a_rank_that_fails_in_any_mode_ends_the_others_which_name_it(mode, finished, config, torchrun, tmp_path):
    given = {
        "generate": (f"generate.input={finished[1].parent / 'questions.jsonl'}", f"generate.output={tmp_path / 'out'}"),
        "replay": ("replay.step=3",),
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config(f"mode={mode}", *given.get(mode, ()))))
    torchrun(Path(__file__).parent / "failing_mode_on_ranks.py", file, tmp_path / "error")
    assert (tmp_path / "error1").read_text() == "ValueError: the engine is broken"
    error = (tmp_path / "error0").read_text()
    assert error.startswith("PeerError: rank 1 failed first: the engine is broken; rank 0 waited in `"), error
