"""The checks of a GPU: results of processes that end badly, the report, the wheels, and what a CPU runs."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import gpu_check  # noqa: E402
from gpu import child as child_process  # noqa: E402
from gpu import runner  # noqa: E402
from gpu.checks import Check, TooFewGPUsError, all_checks  # noqa: E402

ENDINGS = {
    'echo \'{"status": "passed", "figure": "7 tokens/s"}\' > $4/found.json': ("passed", "7 tokens/s"),
    "echo no such kernel; exit 3": ("failed", "its process ended with status 3: no such kernel"),
    "kill -9 $$": ("failed", "its process ended with signal SIGKILL: its log is empty"),
    "sleep 60": ("failed", "no result after 1 s"),
    "true": ("failed", "its process ended with status 0"),
}


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Lets a line of shell stand where a check runs."""

    def write(line):
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\nmkdir -p "$4"\n{line}\n')
        script.chmod(0o755)
        monkeypatch.setattr(runner.sys, "executable", str(script))

    return write


@pytest.mark.parametrize("line", ENDINGS)
def test_a_check_that_ends_badly_is_one_failed_line(line, child, tmp_path):
    child(line)
    check = Check("part:one", "a part", lambda setting: None, rank=1, seconds=1)
    found = runner.decide(check, tmp_path / "out", True, 100.0)
    status, text = ENDINGS[line]
    assert found["status"] == status and text in found["figure"] + found["reason"]


def test_the_report_has_every_check_also_those_that_do_not_run(child, tmp_path, monkeypatch):
    child("echo broken '<here>'; exit 1")
    checks = [
        Check("one", "the first", lambda setting: None, rank=1, seconds=5),
        Check("two", "the second", lambda setting: None, rank=2, seconds=5, cuda=True),
        Check("three", "the third", lambda setting: None, rank=3, seconds=5, package="no_such_package"),
    ]
    monkeypatch.setattr(runner, "all_checks", lambda: checks)
    assert runner.run(tmp_path, True, [], 100.0) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    found = {result["name"]: result["status"] for result in report["results"]}
    assert found == {"one": "failed", "two": "needs a GPU", "three": "not installed"}
    page = (tmp_path / "report.html").read_text()
    assert "broken &lt;here&gt;" in page and "the package no_such_package" in page and "the third" in page
    assert runner.run(tmp_path, True, ["thr"], 0.0) == 0
    with pytest.raises(SystemExit, match="--only four: no check begins so; there are one, two, three"):
        runner.run(tmp_path, True, ["four"], 0.0)


def test_a_check_that_finds_too_few_gpus_has_not_failed(tmp_path, monkeypatch):
    def needs_two(setting):
        raise TooFewGPUsError("two")

    monkeypatch.setattr(child_process, "all_checks", lambda: [Check("pair", "two GPUs", needs_two, rank=1, seconds=5)])
    child_process.main("pair", tmp_path / "work", tmp_path, "gpu")
    found = json.loads((tmp_path / "work" / "found.json").read_text())
    assert found == {"status": "needs a GPU", "reason": "two"} and found["status"] not in runner.BAD


def test_every_attention_and_float8_recipe_is_a_check_and_names_differ():
    names = [check.name for check in all_checks()]
    assert {f"attention:{name}" for name in ("flash", "varlen", "flex", "sdpa")} < {*names}
    assert {f"fp8:{name}" for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "8k")} < {*names}
    assert len(names) == len({*names})


def wheel(folder, name, content=b""):
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(f"{name.split('-')[0]}/__init__.py", content)


def test_wheels_of_what_is_not_installed_are_unpacked(tmp_path):
    for name in ("pytest-1.0-py3-none-any.whl", "no_such_package-1.0-py3-none-any.whl"):
        wheel(tmp_path, name)
    gpu_check.unpack_wheels(tmp_path, tmp_path / "packages")
    assert [path.name for path in (tmp_path / "packages").iterdir()] == ["no_such_package"]


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("small-1.0-py3-none-any.whl", 10, "bytes in all, of 60000000"),
        ("large-1.0-py3-none-any.whl", 61_000_000, "the wheels are too large to carry"),
        ("built-1.0-cp312-cp312-linux_x86_64.whl", 10, "is built for one system"),
    ],
)
def test_wheels_that_cannot_be_carried_are_refused(name, size, said, tmp_path):
    with (tmp_path / name).open("wb") as file:
        file.truncate(size)
    command = ["bash", str(SCRIPTS / "pack_gpu_check.sh"), "--no-download", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert said in done.stdout + done.stderr
    assert (done.returncode == 0) == name.startswith("small")
