"""The terminal: lines in a pipe, a live display on a terminal, log records that do not break it."""

import errno
import io
import logging
import os
import re
import sys
from pathlib import Path
from typing import TextIO, cast

import pytest
from rich.console import Console

from rft.logger.console import BLOCKS, Output, RunConsole, trend
from rft.logger.history import History, MetricSummary


def terminal(width: int = 120, height: int = 40) -> tuple[RunConsole, io.StringIO]:
    out = io.StringIO()
    return RunConsole(Console(file=out, force_terminal=True, width=width, height=height, legacy_windows=False)), out


def draw(console: RunConsole) -> None:
    """Renews the display now instead of up to a quarter of a second later."""
    assert console._live is not None
    console._live.refresh()


def test_in_a_pipe_there_are_few_lines_and_every_evaluation() -> None:
    out = io.StringIO()
    console = RunConsole(Console(file=out, width=80))
    with console.stage("train", 100, 400):
        for step in range(101, 501):
            evaluated = {"eval/held/accuracy": 0.75, "eval/held/accuracy_stderr": 0.1} if step == 107 else {}
            console.log(step, "train", {"reward/mean": 0.5, "lr": 1.0, **evaluated})
    lines = out.getvalue().splitlines()
    assert len(lines) == 21
    assert lines[0].startswith("train 7/400  eval/held/accuracy 0.75  reward/mean 0.5  eta ")
    assert lines[1].startswith("train 20/400  reward/mean 0.5  eta ")
    assert lines[-1].startswith("train 400/400  reward/mean 0.5  took ")
    assert "\x1b" not in out.getvalue()


def test_outside_a_stage_every_row_is_a_line() -> None:
    out = io.StringIO()
    console = RunConsole(Console(file=out))
    console.log(0, "warmup", {"eval/held/accuracy": 0.0312})
    assert out.getvalue() == "warmup step 0  eval/held/accuracy 0.0312\n"


def test_eta_counts_only_the_steps_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("rft.logger.console.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    console = RunConsole(Console(file=out))
    with console.stage("train", 0, 100, done=80):
        clock[0] += 30.0
        console.log(90, "train", {})  # 10 steps took 30 s, 10 are left
    assert out.getvalue() == "train 90/100  eta 30 s\n"


def test_long_work_in_a_pipe_speaks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("rft.logger.console.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    with RunConsole(Console(file=out)).progress("evaluate", 10) as show:
        for done in range(1, 11):
            clock[0] += 11.0
            show(done)
    assert out.getvalue() == "  evaluate 3/10\n  evaluate 6/10\n  evaluate 9/10\n"


def test_live_table_and_bars_are_drawn() -> None:
    console, out = terminal()
    with console.stage("train", 0, 3), console.progress("generate", 4) as show:
        show(2)
        draw(console)
        for step, value in enumerate((0.125, 0.5, 0.875), 1):
            console.log(step, "train", {"reward/mean": value, "lr": 1e-3, "eval/held/accuracy": value / 2})
    console.stop()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert "0/3" in plain and "3/3" in plain and re.search(r"generate .* 2/4", plain)
    assert re.search(r"reward/mean +0\.875 +" + BLOCKS[0] + BLOCKS[4] + BLOCKS[7], plain)
    assert re.search(r"\blr\b", plain) is None
    assert plain.rindex("eval/held/accuracy") < plain.rindex("reward/mean")


def test_live_table_never_outgrows_the_terminal() -> None:
    console, _ = terminal(width=80, height=14)
    with console.stage("train", 0, 1):
        console.log(1, "train", {f"reward/term{i}": float(i) for i in range(50)})
        table = console._table()
        assert table.row_count + len(console._bars.tasks) + 4 <= 14
    console.stop()


def test_log_records_go_above_the_display_and_handlers_get_their_streams_back() -> None:
    # rich takes over the real streams, so the console must write where sys.stdout points
    before_out, before_err = sys.stdout, sys.stderr
    out = io.StringIO()
    sys.stdout = sys.stderr = out
    handler = logging.StreamHandler(out)
    logger = logging.getLogger("test_console")
    logger.addHandler(handler)
    try:
        console = RunConsole(Console(force_terminal=True, width=100, height=30, legacy_windows=False))
        with console.stage("train", 0, 2):
            assert handler.stream is not out
            draw(console)
            logger.warning("beware")
            draw(console)
            sys.stderr.write("old and grey\n")
        console.stop()
        assert handler.stream is out and sys.stderr is out
        text = out.getvalue()
        # the bar is erased before each of them, else they would stand in its middle
        assert re.search(r"\x1b\[2Kbeware\n", text) and re.search(r"\x1b\[2Kold and grey\n", text)
    finally:
        logger.removeHandler(handler)
        sys.stdout, sys.stderr = before_out, before_err


def test_text_from_outside_is_shown_as_it_is_and_changes_no_terminal() -> None:
    console, out = terminal()
    console.message("\x1b[31m[/b] of a server\rx\n2. [red]")
    console.warning("\x9b31m")
    with console.stage("[/b]", 0, 2), console.progress("[/b]", 2):
        console.log(1, "[/b]", {"reward/[/b]": 1.0})
    console.stop()
    console.summary([MetricSummary("eval/[/b]", 0.1, 0.2, 0.2)], Path("run"), None, 1.0, "\x1b[31m[/i]")
    piped = RunConsole(Console(file=(lines := io.StringIO()), width=80))
    piped.log(1, "train", {"reward/[/b]": 1.0, "eval/[red]x[/b]/accuracy": 1.0})
    assert lines.getvalue() == "train step 1  eval/[red]x[/b]/accuracy 1\n"
    assert " [31m[/b] of a server x\n2. [red]\n" in out.getvalue()
    assert not {"\x1b[31m", "\x9b"} & {*re.findall(r"\x1b\[31m|\x9b", out.getvalue())}


def test_trend_by_hand() -> None:
    assert trend([0.0, 0.5, 1.0]) == "▁▅█"
    assert trend([1.0, float("nan"), 0.0]) == "█▁"
    assert trend([3.0]) == ""
    assert trend([2.0, 2.0]) == "▁▁"
    assert trend([float(i) for i in range(36)]) == "▁▁▂▂▃▃▃▄▄▅▅▆▆▆▇▇██"


def test_recall_brings_back_the_trend() -> None:
    console, _ = terminal()
    console.recall(
        History([{"step": 1, "stage": "t", "reward/mean": 0.0}, {"step": 2, "stage": "t", "reward/mean": None}])
    )
    console.log(3, "t", {"reward/mean": 1.0})
    assert list(console._values["reward/mean"]) == [0.0, 1.0]


def test_summary_names_values_and_places(tmp_path: Path) -> None:
    out = io.StringIO()
    metrics = [MetricSummary("eval/held/accuracy", 0.25, 0.975, 0.95), MetricSummary("entropy", 1.5, None, 0.5)]
    RunConsole(Console(file=out, width=100)).summary(metrics, tmp_path, tmp_path / "report.html", 83.0)
    text = out.getvalue()
    assert re.search(r"eval/held/accuracy +0\.25 +0\.975 +0\.95", text)
    assert re.search(r"entropy +1\.5 +\N{EN DASH} +0\.5", text)
    assert "1 min 23 s" in text and str(tmp_path / "report.html") in text


def test_text_for_a_pipe_without_a_reader_is_dropped() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        console = RunConsole(Console(file=cast(TextIO, Output(stream))))
        for _ in range(2):
            console.message("hello")
            console.stop()
        os.write(writer, b"the pipe of other writers of this file leads to nowhere, too")


@pytest.mark.parametrize(("error", "nowhere"), [(errno.EIO, True), (errno.EPIPE, True), (errno.ENOSPC, False)])
def test_a_full_disk_is_tried_again_and_a_closed_terminal_is_not(tmp_path: Path, error: int, nowhere: bool) -> None:
    class Failing(io.StringIO):
        def __init__(self, file: TextIO) -> None:
            super().__init__()
            self.file = file

        def write(self, text: str) -> int:
            raise OSError(error, "no")

        def fileno(self) -> int:
            return self.file.fileno()

    with (tmp_path / "file").open("w") as file:
        output = Output(Failing(file))
        assert output.write("hello") == 5
        file.write("later")
    assert (tmp_path / "file").read_text() == ("" if nowhere else "later")


def test_an_output_is_the_terminal_that_it_writes_to() -> None:
    output = Output(sys.__stdout__ or sys.stdout)
    assert (output.isatty(), output.encoding) == (sys.__stdout__.isatty(), sys.__stdout__.encoding)  # type: ignore[union-attr]
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    Output(out).write("ß")
    Output(out).flush()
    assert out.buffer.getvalue() == b"\xdf" and Output(out).encoding == "latin-1"  # type: ignore[attr-defined]
