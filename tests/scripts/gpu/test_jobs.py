"""Runs of checks: how they are compared, and the reason of one that failed."""

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))
from gpu import jobs  # noqa: E402
from gpu.checks import FailedError, Setting, all_checks  # noqa: E402

ROW = {"step": 1, "loss/nll": 2.0, "grad_norm": 1.0, "throughput/tokens_per_s": 100.0, "memory/peak_gib": 1.5}


def test_runs_are_compared_by_losses_and_the_first_gradient():
    found = jobs.compare([ROW, ROW | {"loss/nll": 2.02}], [ROW, ROW], loss=0.02, gradient=0.1)
    assert found == {
        "loss_difference": pytest.approx(0.01),
        "gradient_difference": 0.0,
        "tokens_per_s": 100.0,
        "memory_gib": 1.5,
    }
    skipped = {name: value for name, value in ROW.items() if name != "grad_norm"}  # as float16 may do at first
    assert "gradient_difference" not in jobs.compare([skipped, ROW], [ROW, ROW], loss=0.02, gradient=0.1)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([ROW], "1 steps instead of 2"),
        ([ROW, ROW | {"loss/nll": float("nan")}], "a loss is not finite"),
        ([ROW, ROW | {"loss/nll": 2.1}], "loss difference 0.05, more than 0.02"),
        ([ROW | {"grad_norm": 1.5}, ROW], "gradient difference 0.5, more than 0.1"),
        ([{"loss/nll": 2.0}] * 2, "no update was made"),
    ],
)
def test_runs_that_differ_fail(rows, reason):
    with pytest.raises(FailedError, match=reason):
        jobs.compare(rows, [ROW, ROW], loss=0.02, gradient=0.1)


def test_the_reason_of_a_failed_job_is_its_error():
    assert jobs.last_error("x\nerror: strategy.attention: no such key\n\n") == "error: strategy.attention: no such key"
    assert jobs.last_error("a\nValueError: b\nthe end\n") == "ValueError: b"
    assert jobs.last_error("") == ""


def test_a_reference_is_made_once(tmp_path):
    run = tmp_path / "work" / "reference_float32" / "run"
    run.mkdir(parents=True)
    (run / "result.json").write_text("{}")
    (run / "metrics.jsonl").write_text("\n".join(json.dumps(ROW | {"step": step}) for step in (0, 1)))
    setting = Setting(tmp_path / "work" / "bf16", cpu=True)
    assert jobs.reference(setting, "float32", ["no_such_key=1"]) == [ROW]


def test_flash_attention_needs_a_package():
    packages = {check.name: check.package for check in all_checks()}
    assert packages["attention:flash"] in ("flash_attn", "flash_attn_interface")
    assert packages["attention:sdpa"] is None
