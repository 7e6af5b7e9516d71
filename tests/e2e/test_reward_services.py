"""A whole run whose reward is computed by a server of mode=serve equals the run that computes it itself."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import rft
from rft.remote.server_process import free_port
from rft.setup.assembly import Job
from tests.helpers import CLOCK, identical, yaml_options

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = ("steps=3", "eval.every=2", "trajectories.every=1", "reward.accuracy=function", "reward.max_unscored=1.0",
         "reward.terms.format.weight=0")  # fmt: skip
FUNCTION = """
def score(response, row):
    if len(response) % 5 == 4:
        raise ValueError("a length that it does not like")
    return {"score": float(response == row["answer"]) + 0.1 * len(response), "letters": len(response)}
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of a server of the function, whose random key is in the environment."""
    (tmp_path / "rewards.py").write_text(FUNCTION)
    command = [sys.executable, "-m", "rft.main", "mode=serve", "reward=function", f"serve.port={(port := free_port())}"]
    command += [f"reward.terms.function.function={tmp_path / 'rewards.py'}:score", f"output_dir={tmp_path}/server"]
    environment = os.environ | {"PYTHONPATH": str(Path(rft.__file__).parent.parent)}
    serving = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert next(serving.stdout).startswith("serving the reward terms function at http://127.0.0.1:")
    said = [next(serving.stdout) for _ in range(4)]
    assert said[1].rstrip().endswith("reward.terms.remote.token=RFT_SERVE_KEY")
    monkeypatch.setenv("RFT_SERVE_KEY", said[3].removeprefix("    export RFT_SERVE_KEY=").rstrip())
    yield f"http://127.0.0.1:{port}"
    serving.send_signal(signal.SIGTERM)
    serving.communicate(timeout=60)
    assert serving.returncode == 0


def test_values_of_a_server_train_the_same_weights(server, tiny, tmp_path):
    def fit(name, node):
        folder = tmp_path / name
        config = tiny(*SIZES, "+reward.terms.function.weight=1.0", f"+reward.terms.function.name={name}",
                      f"output_dir={folder}")  # fmt: skip
        config["reward"]["terms"]["function"] = node | {"weight": 1.0}
        Job(config).fit("")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        numbers = [{key: value for key, value in row.items() if not key.startswith(CLOCK)} for row in rows]
        return numbers, load_file(folder / "checkpoints/latest/actor/model.safetensors")

    own = {"function": f"{tmp_path / 'rewards.py'}:score"}
    numbers, weights = fit("inline", own | {"call": {"failed": "drop_row"}})
    call = {"failed": "drop_row", "concurrency": 3, "deadline_s": 60.0, "tries": 2}
    http = call | {"workers": "http", "http": {"addresses": [server], "token": "RFT_SERVE_KEY", "rows_per_request": 3}}
    remote = yaml_options("reward/terms/remote.yaml")["remote"] | {"_target_": "rft.reward.services.remote.RemoteTerm"}
    remote |= {"addresses": [server], "token": "RFT_SERVE_KEY", "term": "function", "rows_per_request": 5, "call": call}
    for name, node in (("http", own | {"call": http}), ("remote", remote)):
        others, found = fit(name, node)
        assert others == numbers and identical(found, weights), name
    steps = [row for row in numbers if row["stage"] == "train"]
    assert all("reward/function/letters" in row for row in steps) and "reward/function/unscored" in str(steps)
