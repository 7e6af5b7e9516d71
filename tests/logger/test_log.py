"""RunLog: what lands in the run folder, and who else is told."""

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rft.logger.console import RunConsole
from rft.logger.log import STARTED, RunLog, SilentLog


class Listener:
    """A sink that remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def check(self) -> None:
        pass

    def open(self, run: Path, config: dict[str, Any]) -> None:
        self.heard.append(("open", run, config))

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        self.heard.append(("log", step, stage, dict(numbers)))

    def rewind(self, step: int) -> None:
        self.heard.append(("rewind", step))

    def close(self, failed: bool) -> None:
        self.heard.append(("close", failed))


def quiet() -> RunConsole:
    return RunConsole(Console(file=io.StringIO()))


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_every_row_is_on_disk_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", {}, console=quiet())
    log.log(0, "train", {"eval/held/accuracy": 0.25})
    log.log(1, "train", {"reward/mean": 0.5, "lr": 1})
    found = rows(tmp_path / "run")  # before close
    assert found[0] | {"time/elapsed_s": 0} == {
        "step": 0, "stage": "train", "eval/held/accuracy": 0.25, "time/elapsed_s": 0
    }  # fmt: skip
    assert (found[1]["step"], found[1]["reward/mean"], found[1]["lr"]) == (1, 0.5, 1.0)
    assert 0 <= found[0]["time/elapsed_s"] <= found[1]["time/elapsed_s"] < 60
    assert STARTED[-1] == tmp_path / "run"
    log.close()


def test_nan_and_infinity_are_null_on_disk_and_themselves_for_sinks(tmp_path: Path) -> None:
    sink = Listener()
    with RunLog(tmp_path, {"seed": 1}, [sink], quiet()) as log:
        log.log(1, "train", {"a": math.nan, "b": math.inf, "c": 2.0})
    row = rows(tmp_path)[0]
    assert (row["a"], row["b"], row["c"]) == (None, None, 2.0)
    assert sink.heard[0] == ("open", tmp_path, {"seed": 1})
    told = sink.heard[1]
    assert told[:3] == ("log", 1, "train") and math.isnan(told[3]["a"]) and told[3]["b"] == math.inf
    assert sink.heard[-1] == ("close", False)


def test_rewind_forgets_what_lies_after_the_checkpoint(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}, console=quiet()) as log:
        for step in range(6):
            log.log(step, "train", {"reward/mean": float(step)})
            log.samples(step, [{"prompt": "p", "response": "r", "score": 1.0}])
            log.worst_tokens(step, [{"token": 7, "text": "ß"}] if step != 2 else [])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "stage": "tr')  # killed while it wrote
    sink = Listener()
    with RunLog(tmp_path, {}, [sink], quiet()) as log:
        log.rewind(3)
        log.log(4, "train", {"reward/mean": 40.0})
    assert [(row["step"], row["reward/mean"]) for row in rows(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]
    assert sorted(p.name for p in (tmp_path / "trajectories").iterdir()) == [f"step_0000000{i}.jsonl" for i in range(4)]
    worst = (tmp_path / "worst_tokens.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in worst] == [
        {"step": step, "tokens": [{"token": 7, "text": "ß"}]} for step in (0, 1, 3)
    ]
    assert ("rewind", 3) in sink.heard
    with RunLog(tmp_path, {}, console=quiet()) as log:
        log.rewind(-1)
    assert rows(tmp_path) == []


def test_elapsed_time_goes_on_after_a_rewind(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "stage": "train", "time/elapsed_s": 500.0}\n')
    with RunLog(tmp_path, {}, console=quiet()) as log:
        log.rewind(1)
        log.log(2, "train", {})
    assert 500 <= rows(tmp_path)[1]["time/elapsed_s"] < 560


def test_samples_are_one_object_a_line(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [
        {"prompt": "Größe?\n", "response": "日本", "score": 0.5, "answer": ["a"]},
        {"prompt": "", "response": ""},
    ]
    with RunLog(tmp_path, {}, console=quiet()) as log:
        log.samples(10, given)
    lines = (tmp_path / "trajectories" / "step_00000010.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == given


def test_a_failing_run_leaves_a_report_and_says_why(tmp_path: Path) -> None:
    sink, out = Listener(), io.StringIO()
    with (
        pytest.raises(FloatingPointError),
        RunLog(tmp_path, {}, [sink], RunConsole(Console(file=out))) as log,
        log.stage("train", 0, 10),
    ):
        log.log(1, "train", {"reward/mean": 0.5})
        raise FloatingPointError("loss/policy is NaN at step 2")
    assert (tmp_path / "report.html").exists()
    assert sink.heard[-1] == ("close", True)
    assert "stopped by FloatingPointError: loss/policy is NaN at step 2" in out.getvalue()


def test_a_second_close_does_nothing(tmp_path: Path) -> None:
    sink = Listener()
    log = RunLog(tmp_path, {}, [sink], quiet())
    log.close()
    log.close("again")
    assert [heard for heard in sink.heard if heard[0] == "close"] == [("close", False)]


def test_silent_log_takes_everything_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with SilentLog() as log:
        log.rewind(3)
        with log.stage("train", 0, 1), log.progress("evaluate", 3) as show:
            show(1)
        log.log(1, "train", {"a": 1.0})
        log.samples(1, [{}])
        log.worst_tokens(1, [{}])
        log.message("hello")
    assert list(tmp_path.iterdir()) == []
    assert {name for name in vars(RunLog) if not name.startswith("_")} <= set(vars(SilentLog))
