"""Whole runs whose data and functions bring names and texts that the run itself uses, or that a terminal interprets."""

import json
import re

import pytest

from rft.sanitize import MOST_NAMES, spell_name
from rft.setup.assembly import Job

pytestmark = pytest.mark.usefixtures("one_thread")
FIELDS = {
    "unscored": {"function": "because"},
    "episode": 5,
    "text": "own",
    "finish_reason": "own",
    "scores": 1,
    "set": 2,
}
REWARD = """
def reward(response, row):
    return float(row["episode"] == 5) + row["unscored"]["function"].count("because")
"""
SIZES = ("warmup=none", "steps=2", "eval.every=2", "trajectories.every=1", "+reward.terms.function.weight=1.0",
         "reward.accuracy=function", "reward.terms.format.weight=0", "reward.terms.exact_match.weight=0")  # fmt: skip


@pytest.fixture
def run(tiny, tmp_path):
    """Runs GRPO with a reward function and rows; returns the lines of its metrics, of its texts, and its folder."""

    def fit(code, rows, *overrides):
        (tmp_path / "rewards.py").write_text(code)
        nodes = {}
        for name, part in (("train", rows[4:]), ("eval", rows[:4])):
            file = tmp_path / f"{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in part))
            nodes[name] = {"_target_": "rft.data.rows.sources.FileRows", "path": str(file), "columns": {}}
            nodes[name] |= {"schema": None, "limit": None}
        config = tiny(*SIZES, f"+reward.terms.function.function={tmp_path / 'rewards.py'}:reward", *overrides)
        config["data"] |= {"train": nodes["train"], "eval": {"heldout": nodes["eval"]}}
        Job(config).fit("")
        folder = tmp_path / "run"
        texts = [json.loads(line) for file in sorted(folder.glob("trajectories/*")) for line in file.open()]
        return [json.loads(line) for line in (folder / "metrics.jsonl").open()], texts, folder

    return fit


def test_fields_of_the_data_that_the_run_has_too_are_those_of_the_functions(run):
    rows = [{"prompt": f"{number}=", "answer": f"{number}", **FIELDS} for number in range(12)]
    numbers, texts, folder = run(REWARD, rows)
    assert [row["reward/mean"] for row in numbers if "reward/mean" in row] == [2.0, 2.0]
    assert not any("unscored" in name for row in numbers for name in row)
    assert {"train", "eval/heldout"} == {row["set"] for row in texts}
    assert not any(row.keys() & {*FIELDS} - {"set"} for row in texts), "no field of the data"
    assert (folder / "report.html").is_file() and (folder / "result.json").is_file()


def test_a_name_of_a_set_that_metrics_cannot_have_is_refused(tiny):
    config = tiny()
    config["data"]["eval"] = {"[/b]": config["data"]["eval"]["heldout"]}
    with pytest.raises(ValueError, match=r"data\.eval\.\[/b\]: names of metrics have the name '\[/b\]'.*rename it"):
        Job(config).fit("")


NAMES = """
def reward(response, row):
    names = ["a\\nb", "", "../../x", "unscored", "time/step_s", "[/b]", "x_stderr", "\\x1b[31m", *map(str, range(300))]
    if row["answer"] == "4":
        raise type("\\x1b[31m" * 10**5, (Exception,), {})("\\n[/b]\\ud800" * 10**5)
    return {"score": 1.0, **dict.fromkeys(names, 2.0)}
"""


def test_names_from_outside_become_those_that_metrics_can_have(run, capsys, caplog):
    rows = [
        {"prompt": f"{number}=", "answer": f"{number}", "data_source": "[/b]\n" * (number % 2)} for number in range(12)
    ]
    numbers, texts, folder = run(NAMES, rows, "reward.call.failed=drop_row", "reward.max_unscored=1")
    found = {name for row in numbers for name in row}
    assert all(re.fullmatch(r"[\w.+@%/-]+", name) and len(name) < 100 for name in found)
    further = {name for name in found if name.startswith("reward/function/") and "unscored" not in name.split("/")}
    assert len(further) == MOST_NAMES and "reward/function/time/step_s" in further
    assert {
        "reward/function/" + spell_name(name) for name in ("a\nb", "", "../../x", "unscored", "x_stderr")
    } <= further
    assert any(name.startswith("eval/heldout/b_") for name in found), "the data source"
    assert all(len(json.dumps(row)) < 10_000 for row in texts), "a reason is cut"
    assert (folder / "report.html").is_file() and (folder / "result.json").is_file()
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "further numbers of reward.terms.function" in caplog.text
