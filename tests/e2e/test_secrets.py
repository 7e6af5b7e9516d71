"""Whole runs with a secret in an environment variable: the run uses it, and no file of the run folder holds it."""

import json
import shutil
import sys

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rft.actor.init import read_config
from rft.errors import FunctionError, Problems
from rft.logger.redact import resolve
from rft.main import main
from rft.setup.assembly import Job
from tests.conftest import CONFIG

pytestmark = pytest.mark.usefixtures("one_thread")
SECRET, TEXT = "sk-3141592'f(1)==", "${oc.env:RFT_TEST_SECRET}"
REWARD = f"""
import json
from urllib.parse import quote

def score(response, row, *, key):
    return float(key == "Bearer {SECRET[:4]}" + "{SECRET[4:]}")

def failing(response, row, *, key):
    raise ValueError(f"the server refuses {{key}}, {{key!r}}, {{json.dumps(key)}}, {{quote(key)}}")
"""
STEPS = ("steps=2", "trajectories.every=1", "checkpoint.every=1", "reward.terms.format.weight=0", "warmup=none")


@pytest.fixture
def overrides(sized, tmp_path, monkeypatch):
    """The overrides of a run whose reward gets a secret."""
    monkeypatch.setenv("RFT_TEST_SECRET", SECRET)
    (tmp_path / "rewards.py").write_text(REWARD)

    def make(function, *more):
        term = f"+reward.terms.function={{function: '{tmp_path / 'rewards.py'}:{function}', weight: 1.0}}"
        key = f"+reward.terms.function.key='Bearer {TEXT}'"
        return [*sized(*STEPS, term, key, f"output_dir={tmp_path / 'run'}", *more)]

    return make


def composed(overrides):
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        return resolve(compose("main", overrides))


def holding(folder, text):
    """The files below a folder that hold a text."""
    return [str(path) for path in sorted(folder.rglob("*")) if path.is_file() and text.encode() in path.read_bytes()]


class ConfigFile:
    """A logger that writes the config to a file, as those of tracking services do."""

    def open(self, run, config):
        (run / "logged.json").write_text(json.dumps(config))

    def log(self, step, stage, numbers): ...

    def samples(self, step, rows): ...

    def close(self, failed): ...

    def rewind(self, step): ...


@pytest.mark.parametrize("logger", ["none", pytest.param("wandb", marks=pytest.mark.slow)])
def test_no_file_of_a_run_holds_a_secret_that_the_run_uses(overrides, logger, tmp_path, capsys):
    if logger == "wandb":
        pytest.importorskip("wandb")
    job = Job(composed(overrides("score", *(["logger=wandb", "logger.wandb.mode=offline"] * (logger == "wandb")))))
    job.sinks.append(ConfigFile())
    job.fit("")
    run = tmp_path / "run"
    assert json.loads((run / "logged.json").read_text())["reward"]["terms"]["function"]["key"] == f"Bearer {TEXT}"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert rows[-1]["reward/mean"] == 1.0, "the reward got the secret itself"
    assert holding(run, SECRET) == []
    assert OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))["reward"]["terms"]["function"]["key"] == (
        f"Bearer {TEXT}"
    )
    assert TEXT in (run / "report.html").read_text().replace("&#x27;", "'")
    assert SECRET not in capsys.readouterr().out


def test_another_secret_continues_the_run(overrides, tmp_path, monkeypatch):
    config = composed(overrides("score"))
    Job(config).fit("")
    (tmp_path / "run" / "result.json").unlink()
    monkeypatch.setenv("RFT_TEST_SECRET", "sk-2718281828459045")
    other = composed(overrides("score"))
    assert other["reward"] != config["reward"]
    Job(other).fit("")
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]


def test_no_message_and_no_traceback_holds_a_secret(overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr("sys.argv", ["rft", *overrides("failing")])
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert f"the server refuses Bearer {TEXT}" in " ".join(printed.err.split())
    assert SECRET[:7] not in printed.err + printed.out
    assert f"refuses Bearer {TEXT}" in (tmp_path / "error.json").read_text()
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(FunctionError) as raised:
        main()
    sys.excepthook(raised.type, raised.value, raised.tb)  # as the interpreter does
    printed = capsys.readouterr()
    assert "Traceback" in printed.err and f"the server refuses Bearer {TEXT}" in printed.err
    assert SECRET[:7] not in printed.err + printed.out
    (tmp_path / "rewards.py").unlink()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)  # its bytecode, where Python writes it
    assert holding(tmp_path, SECRET) == []


def test_code_in_the_folder_of_a_model_does_not_run(resolved, tmp_path):
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass C: ...\n")
    for file, key in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        (folder / file).write_text(json.dumps({"model_type": "mine", "auto_map": {key: "code.C"}}))
    path = (f"actor.path={folder}", f"actor.tokenizer.path={folder}")
    with pytest.raises(Problems, match=r"(?s)^actor\.tokenizer\.path=.*trust_remote_code"):
        Job(resolved("actor=hf", "actor/tokenizer=pretrained", *path, f"output_dir={tmp_path / 'run'}")).fit("")
    with pytest.raises(ValueError, match=r"^actor\.path: no model can be read"):
        read_config(str(folder), None, 0, "actor")
    assert not ran.exists()
