"""Sweeps: the comparison, and the Hydra callback in a real multirun with a job that fails."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from rft.report.comparison import SweepRun, comparison_table, labels, write_comparison

JOB = """
from pathlib import Path

import hydra
from rft.logger.log import RunLog
from rft.report.run_page import RUN_REPORT

@hydra.main(version_base="1.3", config_path=".", config_name="main")
def main(config):
    if config.a == 2:
        raise ValueError("a is <two>")
    with RunLog(Path(f"out/a={config.a}"), {}, report=RUN_REPORT) as log:
        for step in range(3):
            log.log(step, "train", {"reward/mean": config.a * step / 10, "eval/held/accuracy": 0.1 * step})
    return 0.1 * config.a

main()
"""
CONFIG = """
defaults: [_self_]
a: 0
b: 0
hydra:
  output_subdir: null
  run: {dir: .}
  sweep: {dir: out, subdir: .}
  callbacks:
    compare: {_target_: rft.report.sweep.CompareRuns}
"""


def make(folder: Path, values: list[float]) -> Path:
    folder.mkdir()
    rows = [{"step": i, "stage": "train", "reward/mean": v, "eval/held/accuracy": v / 2} for i, v in enumerate(values)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_labels_leave_out_what_all_runs_share() -> None:
    runs = [SweepRun(None, ["steps=5", "seed=0", "lr=1"]), SweepRun(None, ["steps=5", "seed=1", "lr=1"])]
    assert labels(runs) == ["seed=0", "seed=1"]
    assert labels(runs[:1]) == ["steps=5 seed=0 lr=1"]
    assert labels([SweepRun(Path("x/grpo"), []), SweepRun(None, [])]) == ["grpo", "defaults"]


def test_table_and_page_hold_every_run_and_every_failure(tmp_path: Path) -> None:
    runs = [
        SweepRun(make(tmp_path / "one", [0.1, 0.9, 0.8]), ["seed=0"], 0.4),
        SweepRun(make(tmp_path / "two", [0.2, 0.3]), ["seed=<1>"], failure="FloatingPointError: NaN <here>"),
        SweepRun(None, ["seed=2"], failure="ValueError: no name"),
    ]
    (tmp_path / "one" / "report.html").write_text("")
    out = io.StringIO()
    Console(file=out, width=200).print(comparison_table(runs))
    lines = out.getvalue().splitlines()
    assert any(all(t in line for t in ("seed=0", "0.4", "0.1 → 0.8 (0.9)", "0.05 → 0.4 (0.45)")) for line in lines)
    assert sum("failed" in line for line in lines) == 2

    text = write_comparison(runs, tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 2 and "3 runs, 2 of them failed" in text
    assert 'href="one/report.html"' in text and 'href="two' not in text
    assert "seed=&lt;1&gt;" in text and "NaN &lt;here&gt;" in text and "<here>" not in text


def test_runs_that_differ_in_the_seed_are_one_row_and_one_curve(tmp_path: Path) -> None:
    values = {("grpo", 0): [0.0, 0.2], ("grpo", 1): [0.0, 0.4], ("gspo", 0): [0.0, 0.4], ("gspo", 1): [0.0, 0.8]}
    runs = [
        SweepRun(make(tmp_path / f"{name}{seed}", rewards), [f"algorithm={name}", f"seed={seed}"], rewards[-1])
        for (name, seed), rewards in values.items()
    ]
    out = io.StringIO()
    Console(file=out, width=200).print(comparison_table(runs))
    [baseline] = [line for line in out.getvalue().splitlines() if "algorithm=grpo" in line]
    [other] = [line for line in out.getvalue().splitlines() if "algorithm=gspo" in line]
    assert "0.3 ± 0.14" in baseline and "seed" not in out.getvalue()
    assert "0.6 ± 0.28" in other and "+0.3 ± 1.3" in other  # 0.2 and 0.4: 12.706 * 0.1414 / sqrt(2) = 1.27
    text = write_comparison(runs, tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert text.count("<polygon") == 4 and text.count("<svg") == 2, "a band for each group in each chart"


def test_curves_begin_where_the_runs_differ(tmp_path: Path) -> None:
    runs = [
        SweepRun(make(tmp_path / "a", [1, 2, 3, 4, 5]), ["lr=1"], 0.0),
        SweepRun(make(tmp_path / "b", [1, 2, 3, 5, 6]), ["lr=2"], 0.0),
    ]
    text = write_comparison(runs, tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert "equal up to step 2" in text
    assert "&quot;x&quot;:[2,4," in text


def test_a_metric_of_the_common_steps_alone_has_no_chart(tmp_path: Path) -> None:
    runs = []
    for name, last in (("a", 1.0), ("b", 2.0)):
        rows = [{"step": 1, "stage": "warmup", "loss/nll": 3.0}, {"step": 2, "stage": "train", "loss/ppo_clip": last}]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(SweepRun(tmp_path / name, [f"lr={last}"], 0.0))
    text = write_comparison(runs, tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert "<b>loss/ppo_clip</b>" in text and "loss/nll" not in text


def test_nothing_slow_is_imported() -> None:
    code = (
        "import rft.report.sweep, sys;"
        "from rft.logger import mlflow, swanlab, tensorboard, trackio, wandb;"
        "assert not {'torch', 'transformers', 'numpy', 'mlflow', 'swanlab', 'trackio', 'wandb'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program of Hydra, in a folder that has the page of an earlier sweep."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "main.yaml").write_text(CONFIG)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "comparison.html").write_text("of an earlier sweep")

    def started(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "job.py", *overrides]
        environment = os.environ | {"COLUMNS": "200", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)

    return started


def test_a_multirun_ends_with_a_table_and_a_page_though_a_job_fails(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    failing = run("-m", "a=1,2,3", "b=7")
    assert failing.returncode != 0
    page = (tmp_path / "out" / "comparison-2.html").read_text(encoding="utf-8")
    assert "3 runs, 1 of them failed" in page and "a=1" in page and "b=7" not in page and "a is &lt;two&gt;" in page
    assert "comparison-2.html" in failing.stdout and "failed: a=2: ValueError: a is <two>" in failing.stdout
    assert (tmp_path / "out" / "comparison.html").read_text() == "of an earlier sweep"
    assert "Callback" not in failing.stderr  # Hydra turns errors of callbacks into warnings


@pytest.mark.slow
def test_a_multirun_whose_jobs_end_well_and_a_single_run(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    good = run("-m", "a=1,3")
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("comparison-2.html") == 1
    single = run("a=1")
    assert single.returncode == 0 and "comparison" not in single.stdout
