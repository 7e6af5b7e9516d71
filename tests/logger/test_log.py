"""RunLog: the files of the run folder, the sinks, and the report."""

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rft.logger.log
from rft.logger.console import RunConsole
from rft.logger.history import History
from rft.logger.log import STARTED, Report, RunLog, SilentLog
from rft.logger.media import media_files
from tests.data.media_parts import image, user
from tests.logger.records import media_rows


class RecordingSink:
    """A sink that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def check(self) -> None:
        pass

    def open(self, run: Path, config: dict[str, Any]) -> None:
        self.calls.append(("open", run, config))

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        self.calls.append(("log", step, stage, dict(numbers)))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.calls.append(("samples", step, list(rows)))

    def rewind(self, step: int) -> None:
        self.calls.append(("rewind", step))

    def close(self, failed: bool) -> None:
        self.calls.append(("close", failed))


def page(run: Path, history: History) -> Path:
    """Writes a page that counts its versions."""
    path = run / "page.txt"
    path.write_text((path.read_text() if path.exists() else "") + "x")
    return path


def conclusions(history: History) -> list[str]:
    return [f"{len(history.steps)} rows"]


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


def test_every_row_is_synced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def recorded(number: int) -> None:
        fsync(number)
        synced.append(os.fstat(number).st_size)

    monkeypatch.setattr(os, "fsync", recorded)
    with RunLog(tmp_path, {}, console=quiet()) as log:
        synced.clear()
        for step in (1, 2):
            log.log(step, "train", {"loss/nll": 1.0})
            assert len(synced) == step and synced[-1] == (tmp_path / "metrics.jsonl").stat().st_size > 0


def test_the_name_of_the_file_is_on_the_disk_before_its_first_row(
    tmp_path: Path, disk_calls: list[tuple[str, str]]
) -> None:
    with RunLog(tmp_path / "run", {}, console=quiet()) as log:
        synced = [path for call, path in disk_calls if call == "sync"]
        assert synced == [str(tmp_path), str(tmp_path / "run")] and (tmp_path / "run" / "metrics.jsonl").exists()
        log.log(1, "train", {"loss/nll": 1.0})
        disk_calls.clear()
        log.rewind(0)
    named = disk_calls.index(("rename", str(tmp_path / "run" / "metrics.jsonl")))
    assert disk_calls[named - 1] == ("sync", str(tmp_path / "run" / ".metrics.jsonl.partial"))


def test_nan_and_infinity_are_null_on_disk_and_themselves_for_sinks(tmp_path: Path) -> None:
    sink = RecordingSink()
    with RunLog(tmp_path, {"seed": 1}, [sink], quiet()) as log:
        log.log(1, "train", {"a": math.nan, "b": math.inf, "c": 2.0})
    row = rows(tmp_path)[0]
    assert (row["a"], row["b"], row["c"]) == (None, None, 2.0)
    assert sink.calls[0] == ("open", tmp_path, {"seed": 1})
    told = sink.calls[1]
    assert told[:3] == ("log", 1, "train") and math.isnan(told[3]["a"]) and told[3]["b"] == math.inf
    assert sink.calls[-1] == ("close", False)


def test_rewind_forgets_what_lies_after_the_checkpoint(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}, console=quiet()) as log:
        for step in range(6):
            log.log(step, "train", {"reward/mean": float(step)})
            log.samples(step, [{"prompt": "p", "response": "r", "score": 1.0}])
            log.worst_tokens(step, [{"token": 7, "text": "ß"}] if step != 2 else [])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "stage": "tr')  # killed while it wrote
    sink = RecordingSink()
    with RunLog(tmp_path, {}, [sink], quiet()) as log:
        log.rewind(3)
        log.log(4, "train", {"reward/mean": 40.0})
    assert [(row["step"], row["reward/mean"]) for row in rows(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]
    assert sorted(p.name for p in (tmp_path / "trajectories").iterdir()) == [f"step_0000000{i}.jsonl" for i in range(4)]
    worst = (tmp_path / "worst_tokens.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in worst] == [
        {"step": step, "tokens": [{"token": 7, "text": "ß"}]} for step in (0, 1, 3)
    ]
    assert ("rewind", 3) in sink.calls
    with RunLog(tmp_path, {}, console=quiet()) as log:
        log.rewind(-1)
    assert rows(tmp_path) == []


def test_rewind_forgets_the_media_that_no_remaining_text_names(tmp_path: Path) -> None:
    two, sound, none = media_rows(tmp_path)
    first, second = media_files(two, tmp_path)
    repeated = {"prompt": [user(two["prompt"][0]["content"][:1])]}
    (tmp_path / "answers.jsonl").write_text(json.dumps(image(f"media/{second.path.name}")))
    with RunLog(tmp_path, {}, console=quiet()) as log:
        for step, rows in enumerate(([none], [repeated], [two, sound], [two])):
            log.samples(step, rows)
        for step, left in ((2, 3), (1, 2), (-1, 1)):
            log.rewind(step)
            assert len(list((tmp_path / "media").iterdir())) == left, step
    assert second.path.exists() and not first.path.exists()


@pytest.mark.parametrize(
    ("step", "printed", "warned"),
    [
        (2, "the lines after step 2 are dropped", ""),
        (3, "", ""),
        (5, "", "metrics.jsonl has no lines of steps 4 to 5; nothing else is missing\n"),
        (-1, "without a checkpoint all lines are dropped", ""),
    ],
)
def test_lines_that_are_dropped_or_missing_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, printed: str, warned: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "stage": "train"}}\n' for n in range(4)))
    with RunLog(tmp_path, {}) as log:
        log.rewind(step)
        text = capsys.readouterr().out
    assert printed in text and ("dropped" in text) == bool(printed)
    warnings = tmp_path / "warnings.txt"
    assert (warnings.read_text() if warnings.exists() else "") == warned


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
    sink = RecordingSink()
    with RunLog(tmp_path, {}, [sink], quiet()) as log:
        log.samples(10, given)
    assert ("samples", 10, given) in sink.calls
    lines = (tmp_path / "trajectories" / "step_00000010.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == given


def test_a_failing_run_leaves_a_report_and_says_why(tmp_path: Path) -> None:
    sink, out = RecordingSink(), io.StringIO()
    with (
        pytest.raises(FloatingPointError),
        RunLog(tmp_path, {}, [sink], RunConsole(Console(file=out)), Report(page, conclusions)) as log,
        log.stage("train", 0, 10),
    ):
        log.log(1, "train", {"reward/mean": 0.5})
        raise FloatingPointError("loss/policy is NaN at step 2")
    assert (tmp_path / "page.txt").read_text() == "x"
    assert "1 rows" in out.getvalue() and str(tmp_path / "page.txt") in out.getvalue()
    assert sink.calls[-1] == ("close", True)
    assert "stopped by FloatingPointError: loss/policy is NaN at step 2" in out.getvalue()


@pytest.mark.parametrize("steps", [0, 7])
def test_an_interrupted_run_says_how_it_is_resumed(tmp_path: Path, steps: int) -> None:
    out = io.StringIO()
    with (
        pytest.raises(KeyboardInterrupt),
        RunLog(tmp_path, {}, console=RunConsole(Console(file=out, width=200))) as log,
    ):
        for step in range(1, steps + 1):
            log.log(step, "train", {"reward/mean": 0.5})
        raise KeyboardInterrupt
    assert f"\ninterrupted after step {steps}; run the same command to resume\n" in f"\n{out.getvalue()}"


def test_the_report_is_rewritten_after_an_evaluation_but_not_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(rft.logger.log.time, "perf_counter", lambda: clock[0])
    with RunLog(tmp_path, {}, console=quiet(), report=Report(page, conclusions)) as log:
        for step, seconds, numbers in (
            (1, 61.0, {"reward/mean": 0.5}),  # no evaluation
            (2, 62.0, {"eval/held/accuracy": 0.5}),
            (3, 63.0, {"eval/held/accuracy": 0.5}),  # too soon
            (4, 123.0, {"eval/held/accuracy": 0.5}),
        ):
            clock[0] = seconds
            log.log(step, "train", numbers)
        assert (tmp_path / "page.txt").read_text() == "xx"
    assert (tmp_path / "page.txt").read_text() == "xxx"


def test_what_is_logged_after_a_resume_is_in_the_summary(tmp_path: Path) -> None:
    out = io.StringIO()
    for steps in (range(1, 5), range(3, 6)):
        with RunLog(tmp_path, {}, console=RunConsole(Console(file=out)), report=Report(page, conclusions)) as log:
            log.rewind(steps.start - 1)
            for step in steps:
                log.log(step, "train", {"reward/mean": 0.1 * step})
    assert "4 rows" in out.getvalue() and "5 rows" in out.getvalue().partition("4 rows")[2]
    assert [row["step"] for row in History.of(tmp_path).rows()] == [1, 2, 3, 4, 5]


def test_without_a_report_the_summary_names_only_the_folder(tmp_path: Path) -> None:
    out = io.StringIO()
    with RunLog(tmp_path, {}, console=RunConsole(Console(file=out, width=200))):
        pass
    assert out.getvalue().splitlines() == [f"run folder {tmp_path}"]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_second_close_does_nothing(tmp_path: Path) -> None:
    sink = RecordingSink()
    log = RunLog(tmp_path, {}, [sink], quiet())
    log.close()
    log.close("again")
    assert [call for call in sink.calls if call[0] == "close"] == [("close", False)]


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


def test_a_disk_that_is_full_for_a_while_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = tmp_path / "run", io.StringIO()
    with RunLog(run, {}, console=RunConsole(Console(file=out, width=400))) as log:
        log.log(1, "train", {})
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            patch.setattr(Path, "write_bytes", full)
            log.log(2, "train", {})
            log.samples(2, [{"prompt": "p", "response": "r"}])
            log.worst_tokens(2, [{"token": 7}])
            log.warning("of step 2")
        log.log(3, "train", {})
    assert [row["step"] for row in rows(run)] == [1, 2, 3] and len(list((run / "trajectories").iterdir())) == 1
    assert (run / "worst_tokens.jsonl").exists() and "of step 2\n" in (run / "warnings.txt").read_text()
    assert out.getvalue().count("metrics.jsonl': records wait in memory") == 1


def full(*_: Any) -> int:
    raise OSError(28, "No space left on device")


def test_lines_that_wait_at_the_end_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    with RunLog(tmp_path, {}, console=RunConsole(Console(file=out, width=400))) as log:
        monkeypatch.setattr(os, "write", full)
        log.log(1, "train", {})
    assert f"{tmp_path}/metrics.jsonl': the last records of the run are lost" in out.getvalue()


def test_damaged_lines_are_left_out_with_a_warning_and_the_file_is_kept(tmp_path: Path) -> None:
    good = '{"step": 1, "stage": "train"}\n'
    (tmp_path / "metrics.jsonl").write_text(good + '{"stap": 2, "stage": "train"}\n')
    (tmp_path / "worst_tokens.jsonl").write_text("[]\n" + good)
    with RunLog(tmp_path, {}, console=quiet()) as log:
        log.rewind(1)
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("metrics.jsonl", "worst_tokens.jsonl")] == [
        1,
        1,
    ]
    assert (tmp_path / "metrics.jsonl.damaged").read_text().startswith(good)
    assert (tmp_path / "worst_tokens.jsonl.damaged").read_text() == "[]\n" + good
    assert (tmp_path / "warnings.txt").read_text().splitlines() == [
        "metrics.jsonl: line 2 is damaged and left out; metrics.jsonl.damaged is the file as it was",
        "worst_tokens.jsonl: line 1 is damaged and left out; worst_tokens.jsonl.damaged is the file as it was",
    ]


class BrokenSink(RecordingSink):
    """A sink whose calls fail."""

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        raise KeyError("no network")

    samples = close = log  # type: ignore[assignment]


def test_a_report_a_logger_and_conclusions_that_fail_are_one_warning_each(tmp_path: Path) -> None:
    sink, out = RecordingSink(), io.StringIO()
    report = Report(lambda run, history: run / {}["page"], lambda history: history.steps[7])  # type: ignore[index]
    with RunLog(tmp_path, {}, [BrokenSink(), sink], RunConsole(Console(file=out, width=400)), report) as log:
        for step in (1, 2):
            log.log(step, "train", {"reward/mean": 0.5})
            log.samples(step, [{"prompt": "p", "response": "r"}])
    assert [call[0] for call in sink.calls] == ["open", "log", "samples", "log", "samples", "close"]
    texts = (tmp_path / "warnings.txt").read_text().splitlines()
    assert [text.partition(" failed; training does not depend on it: ")[0] for text in texts] == [
        "the logger BrokenSink", "the report", "the conclusions"
    ]  # fmt: skip
    assert texts[1].endswith("KeyError: 'page'") and "reward/mean" in out.getvalue(), "the table is printed"


def test_a_report_that_fails_hides_no_error_of_the_run(tmp_path: Path) -> None:
    out = io.StringIO()
    report = Report(lambda run: run / {}["page"], conclusions)  # type: ignore[index]
    with pytest.raises(ZeroDivisionError), RunLog(tmp_path, {}, (), RunConsole(Console(file=out)), report):
        raise ZeroDivisionError
    assert "stopped by ZeroDivisionError" in out.getvalue()
