"""A finished run of a second, over a file of questions from two sources."""

import json
import shutil

import pytest

from rft.setup.assembly import Job

RUN = (
    "data=questions",
    "data.template=none",
    "metric=eval/questions/accuracy",
    "reward/terms=[gsm8k]",
    "reward.accuracy=gsm8k",
    "reward.terms.gsm8k.method=flexible",
    "warmup=none",
    "actor.model_config.hidden_size=32",
    "actor.model_config.intermediate_size=64",
    "actor.model_config.head_dim=8",
    "rollout.max_new_tokens=4",
    "batch.prompts=4",
    "algorithm.group_size=4",
    "actor.optimizer.lr=0.05",  # every checkpoint answers differently
    "steps=3",
    "checkpoint.every=1",
    "checkpoint.keep_last=9",
    "eval.every=2",
    "eval.samples=6",
    "eval.maj_k=[1,4,6]",
)


def write_questions(path, count, first=0):
    numbers = range(first, first + count)
    rows = [{"prompt": f"add {n}=", "answer": n % 10, "data_source": "odd" if n % 2 else "even"} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def finished(resolved, tmp_path_factory):
    """The config and the folder of the run, for tests that only read it."""
    here = tmp_path_factory.mktemp("finished")
    train = write_questions(here / "train.jsonl", 16)
    held_out = write_questions(here / "questions.jsonl", 24, first=16)
    paths = (f"data.train.path={train}", f"data.eval.questions.path={held_out}", f"output_dir={here / 'run'}")
    Job(resolved(*RUN, *paths)).fit("")
    return (*RUN, *paths), here / "run"


@pytest.fixture
def config(finished, resolved, tmp_path):
    """The config of a copy of the run, with overrides, and with the folder of the copy as output_dir."""
    shutil.copytree(finished[1], tmp_path / "run", symlinks=True)
    return lambda *overrides: resolved(*finished[0], f"output_dir={tmp_path / 'run'}", *overrides)


@pytest.fixture
def unloaded(monkeypatch):
    """Fails where a model is loaded."""
    monkeypatch.setattr("rft.modes.model.load_model", lambda *_: pytest.fail("a model was loaded"))
