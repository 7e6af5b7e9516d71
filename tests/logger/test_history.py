"""metrics.jsonl read back: killed runs, stages, first/best/last."""

import json
import math
from pathlib import Path

import pytest

from rft.logger.history import (
    METRICS_KEYS,
    History,
    MetricSummary,
    StageSpan,
    damage,
    direction,
    duration,
    headline_names,
    parsed_lines,
    read_stages,
    short,
    trajectory_files,
)

ROWS = [
    {"step": 0, "stage": "warmup", "eval/held/accuracy": 0.02},
    {"step": 1, "stage": "warmup", "loss/nll": 2.0},
    {"step": 2, "stage": "warmup", "loss/nll": 1.0, "eval/held/accuracy": 0.2},
    {"step": 3, "stage": "train", "reward/mean": 0.3},
    {"step": 4, "stage": "train", "reward/mean": None, "eval/held/accuracy": 0.95},
    {"step": 5, "stage": "train", "reward/mean": 0.4, "eval/held/accuracy": 0.9},
]


def test_points_keep_the_gap_of_a_nan() -> None:
    assert History(ROWS).points("reward/mean") == [(3, 0.3), (4, None), (5, 0.4)]


def test_stages_begin_where_the_one_before_ended() -> None:
    assert History(ROWS).stages() == [StageSpan("warmup", 0, 2), StageSpan("train", 2, 5)]
    rows = [{"step": 1, "stage": "train"}, {"step": 2, "stage": "train"}]
    assert History(rows).stages() == [StageSpan("train", 0, 2)], "without an evaluation before the first step"


def test_the_rows_come_back_as_they_were_logged() -> None:
    history = History(ROWS[:2])
    for row in ROWS[2:]:
        history.add(row | {"lr": math.nan} if row["step"] == 5 else row)
    assert list(history.rows()) == [*ROWS[:5], ROWS[5] | {"lr": None}] and list(history.steps) == [0, 1, 2, 3, 4, 5]
    assert history.values("reward/mean") == [0.3, 0.4] and history.values("none") == []


@pytest.mark.parametrize(
    "last",
    [
        "",
        '{"step": 6, "stage": "tr',
        '{"step": 6, "stage": "train", "lr": 1.',
        '{"step": 6, "stage": "train", "lr": 1.0}',
    ],
)
@pytest.mark.parametrize("other", [False, True])
def test_stages_are_read_without_the_numbers(tmp_path: Path, other: bool, last: str) -> None:
    """Also of a file that another program has written, and of one whose last line has no end."""
    lines = [json.dumps(row, sort_keys=other and row["step"] == 2) + "\n" for row in ROWS]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + last)
    assert read_stages(tmp_path) == [StageSpan("warmup", 0, 2), StageSpan("train", 2, 6 if last[-1:] == "}" else 5)]


def test_summary_and_milestones() -> None:
    history = History(ROWS)
    assert history.summary("eval/held/accuracy") == MetricSummary("eval/held/accuracy", 0.02, 0.95, 0.9)
    assert history.summary("loss/nll") == MetricSummary("loss/nll", 2.0, None, 1.0)
    assert history.summary("kl/ref") is None
    assert history.milestones("eval/held/accuracy") == [("start", 0.02), ("warmup", 0.2), ("train", 0.9)]


def test_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "stage": "train", "lr": 0.1}\n{"step": 2, "sta')
    assert [row["step"] for row in History.of(tmp_path).rows()] == [1]


LINE = '{"step": 1, "stage": "train"}'
DAMAGED = {
    "half of an object": '{"step": ',
    "no object": "3",
    "two objects": LINE + LINE,
    "another key": '{"stap": 1, "stage": "train"}',
    "a key of another type": '{"step": "1", "stage": "train"}',
    "no text": "\x00",
    "a number that Python does not read": '{"step": ' + "1" * 5000 + "}",
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_is_left_out_and_named_once(line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{LINE}\n{line}\n{LINE}\n{line}\n")
    damaged: list[int] = []
    assert [row for _, row in parsed_lines(path, METRICS_KEYS, damaged)] == list(History.of(tmp_path).rows())
    assert damage(damaged) == "lines 2, 4 are damaged and"
    assert [row["step"] for row in History.of(tmp_path).rows()] == [1, 1]
    assert [record.getMessage() for record in caplog.records] == [f"{path}: lines 2, 4 are damaged and left out"]


def test_a_flipped_bit_anywhere_in_a_file_is_no_error(tmp_path: Path) -> None:
    data = b'{"step": 1, "stage": "train", "lr": 0.5}\n{"step": 2, "stage": "train"}\n'
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            (tmp_path / "metrics.jsonl").write_bytes(flipped)
            history = History.of(tmp_path)
            assert len([*history.rows()]) <= 2 and history.last_step >= 0 and history.stages() is not None


def test_texts_are_files_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    for name in ("step_00000012.jsonl", "step_00000003.jsonl", "step_x.jsonl", "notes.txt"):
        (tmp_path / "trajectories" / name).touch()
    assert [step for step, _ in trajectory_files(tmp_path)] == [3, 12]


def test_a_folder_without_numbers_is_an_empty_history(tmp_path: Path) -> None:
    history = History.of(tmp_path)
    assert (list(history.rows()), history.names, history.stages(), read_stages(tmp_path)) == ([], [], [], [])
    assert (history.last_step, history.elapsed) == (0, 0.0)


def test_headlines_are_one_metric_of_each_set_and_the_reward() -> None:
    names = ["eval/a/length", "eval/a/accuracy_stderr", "eval/a/accuracy", "eval/b/pass@4", "reward/x", "reward/mean"]
    assert headline_names(names) == ["eval/a/accuracy", "eval/b/pass@4", "reward/mean"]
    further = ["eval/a/score", "eval/a/term/f1", "eval/a/term/time/step_s", "eval/a/odd/length", "eval/a/odd/score"]
    assert headline_names(further) == ["eval/a/score", "eval/a/odd/score"]


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("eval/a/accuracy", 1),
        ("reward/mean", 1),
        ("reward/x/unscored/deadline", -1),
        ("reward/canary", -1),
        ("eval/a/unscored", -1),
        ("eval/a/loss", -1),
        ("eval/a/accuracy_stderr", 0),
        ("reward/std", 0),
        ("eval/a/length_mean", 0),
        ("loss/policy", 0),
        ("entropy", 0),
    ],
)
def test_direction(name: str, sign: int) -> None:
    assert direction(name) == sign


def test_numbers_and_times_in_few_characters() -> None:
    numbers = [short(value) for value in (0.91234, 1.2e-05, 31.0, 48211.0, 2.5e6, None, -12345.0)]
    assert numbers == ["0.9123", "1.2e-05", "31", "48.21k", "2.5M", "\N{EN DASH}", "-12.35k"]
    times = [duration(seconds) for seconds in (0.4, 59.4, 59.6, 200, 3599.7, 7500)]
    assert times == ["0 s", "59 s", "1 min 00 s", "3 min 20 s", "1 h 00 min", "2 h 05 min"]
