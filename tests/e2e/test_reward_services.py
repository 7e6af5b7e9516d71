"""A whole run whose reward is computed by a server of reward terms equals the run that computes it itself.

The server runs in a thread; tests/modes/serve/test_reward.py starts it by its command.
"""

import json

import pytest
from safetensors.torch import load_file

from rft.setup.assembly import Job
from tests.helpers import CLOCK, identical, yaml_options
from tests.reward.serving.served import KEY, served

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = ("steps=2", "eval.every=2", "trajectories.every=1", "reward.accuracy=function", "reward.max_unscored=1.0",
         "reward.terms.format.weight=0")  # fmt: skip
FUNCTION = """
def score(response, row):
    if len(response) % 5 == 4:
        raise ValueError("a length that it does not like")
    return {"score": float(response == row["answer"]) + 0.1 * len(response), "letters": len(response)}
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of a server of the function, whose key is in the environment."""
    (tmp_path / "rewards.py").write_text(FUNCTION)
    node = {"function": f"{tmp_path / 'rewards.py'}:score", "weight": 1.0, "call": {"failed": "drop_row"}}
    monkeypatch.setenv("RFT_SERVE_KEY", KEY)
    with served({"function": node}, "function") as address:
        yield address


@pytest.mark.slow
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
