"""The checks of a GPU: results of processes that end badly, the report, the wheels, and what a CPU runs."""

import json
import os
import random
import subprocess
import sys
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from rft.actor.packing.kernels.choose import KERNELS
from rft.strategy.fsdp2_options import Fp8

SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import gpu_check  # noqa: E402
from gpu import child as child_process  # noqa: E402
from gpu import runner  # noqa: E402
from gpu.checks import APART_VARIABLE, Check, Found, TooFewGPUsError, all_checks, importable  # noqa: E402

ENDINGS = {  # what a process does when it comes to the second of three checks; the reason, and how many processes run
    "echo no such kernel; exit 4": ("its process ended with status 4: no such kernel", 2),
    "kill -9 $$": ("its process ended with signal SIGKILL: its log is empty", 2),
    "sleep 60": ("; its process was killed", 2),
    'tell failed "illegal access"; exit 3': ("illegal access", 2),
    'tell failed "no such kernel"': ("no such kernel", 1),
}
CHILD = """#!/bin/sh
echo process >> {starts}
results=$3
tell() {{ echo "{{\\"name\\": \\"$name\\", \\"status\\": \\"$1\\", \\"reason\\": \\"$2\\"}}" >> $results; }}
shift 6
for name; do
  echo "{{\\"name\\": \\"$name\\"}}" >> $results
  if [ $name = two ]; then
    {line}
  else
    tell passed
  fi
done
"""


def check(name, rank, limit=60.0, **needs):
    """One that may take so many seconds."""
    return Check(name, f"the check {name}", lambda setting: None, rank=rank, seconds=(limit - 30) / 3, **needs)


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Lets a script of shell stand where checks run; a line of it is what it does at the check `two`."""

    def write(line):
        script, starts = tmp_path / "python", tmp_path / "starts"
        script.write_text(CHILD.format(starts=starts, line=line))
        script.chmod(0o755)
        monkeypatch.setattr(runner.sys, "executable", str(script))
        return starts

    return write


def results_of(folder):
    report = json.loads((folder / "report.json").read_text())
    return {result["name"]: (result["status"], result["figure"] + result["reason"]) for result in report["results"]}


@pytest.mark.parametrize("line", ENDINGS)
def test_a_check_that_ends_the_process_is_one_failed_line_and_those_behind_it_run(line, child, tmp_path, monkeypatch):
    starts, (reason, processes) = child(line), ENDINGS[line]
    checks = [check("one", 1), check("two", 2, limit=0.3 if "sleep" in line else 60.0), check("three", 3)]
    monkeypatch.setattr(runner, "all_checks", lambda: checks)
    assert runner.run(tmp_path, True, [], "", 1.0) == 1
    found = results_of(tmp_path)
    assert [found["one"], found["three"]] == [("passed", "")] * 2
    assert found["two"][0] == "failed" and found["two"][1].endswith(reason)
    assert len(starts.read_text().splitlines()) == processes


def test_a_process_that_does_not_start_fails_every_check(tmp_path, monkeypatch):
    monkeypatch.setattr(runner.sys, "executable", "/bin/false")
    monkeypatch.setattr(runner, "all_checks", lambda: [check("one", 1), check("two", 2)])
    assert runner.run(tmp_path, True, [], "", 1.0) == 1
    assert results_of(tmp_path) == dict.fromkeys(
        ("one", "two"), ("failed", "its process ended with status 1: its log is empty")
    )


def test_the_report_has_every_check_also_those_that_do_not_run(child, tmp_path, monkeypatch):
    child("tell failed 'broken <here>'")
    checks = [
        check("zero", 0, package="no_such_package"),
        check("two", 1),
        check("three", 2, cuda=True),
        check("four", 3),
    ]
    monkeypatch.setattr(runner, "all_checks", lambda: checks)
    assert runner.run(tmp_path, True, [], "", 1.0) == 1
    statuses = {name: status for name, (status, _) in results_of(tmp_path).items()}
    assert statuses == {"zero": "not installed", "two": "failed", "three": "needs a GPU", "four": "passed"}
    page = (tmp_path / "report.html").read_text()
    assert "broken &lt;here&gt;" in page and "the package no_such_package" in page and "the check three" in page
    assert runner.run(tmp_path, True, ["four", "ze"], "", 1.0) == 0
    assert list(results_of(tmp_path)) == ["zero", "four"]
    assert runner.run(tmp_path, True, [], "thr", 1.0) == 0
    assert list(results_of(tmp_path)) == ["three", "four"]
    for only, first, said in ((["five"], "", "--only five"), ([], "five", "--from five")):
        with pytest.raises(SystemExit, match=f"{said}: no check begins so; there are zero, two, three, four"):
            runner.run(tmp_path, True, only, first, 1.0)


def test_the_plan_names_what_is_not_within_the_minutes(capsys):
    checks = [
        Check(name, "", lambda setting: None, rank=1, seconds=seconds) for name, seconds in (("a", 50), ("b", 20))
    ]
    runner.say_plan(checks, False, 60.0)
    lines = capsys.readouterr().out.splitlines()
    assert "not within --minutes" not in lines[0] and lines[1].endswith("not within --minutes")
    assert lines[2].split() == ["70", "s", "in", "all,", "of", "60"]


def test_a_check_for_which_too_little_time_is_left_is_not_run(tmp_path, monkeypatch):
    checks = [
        Check(name, "", lambda s: Found("done"), rank=1, seconds=seconds) for name, seconds in (("a", 50), ("b", 20))
    ]
    monkeypatch.setattr(child_process, "all_checks", lambda: checks)
    monkeypatch.setattr(child_process, "is_broken", lambda device: False)
    child_process.main(tmp_path / "results.jsonl", tmp_path, "gpu", 30.0, ["a", "b"])
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line.get("status") for line in lines] == [None, "not run", None, "passed"]
    assert lines[1]["reason"] == "30 s are left of --minutes, and it takes about 50"


@pytest.mark.slow
def test_a_command_that_is_killed_has_reported_what_had_ended(tmp_path):
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--cpu", "--only", "machine,products,head,profile,grpo"]
    process = subprocess.Popen([*command, "--out", str(tmp_path)], stdout=subprocess.DEVNULL)
    ended, later = tmp_path / "results.jsonl", "profile:8k"
    while process.poll() is None and not (ended.exists() and later in ended.read_text()):
        time.sleep(0.05)
    time.sleep(random.Random(34).random())
    process.kill()
    assert process.wait() == -9
    found = results_of(tmp_path)
    assert list(found)[:3] == ["machine", "products", "head"] and {status for status, _ in found.values()} == {"passed"}
    page = (tmp_path / "report.html").read_text()
    assert all(figure.split(";")[0] in page for _, figure in found.values())


def test_a_check_that_finds_too_few_gpus_has_not_failed(tmp_path, monkeypatch):
    def needs_two(setting):
        raise TooFewGPUsError("two")

    monkeypatch.setattr(child_process, "all_checks", lambda: [Check("pair", "two GPUs", needs_two, rank=1, seconds=5)])
    child_process.main(tmp_path / "results.jsonl", tmp_path / "work", "cpu", 5.0, ["pair"])
    begun, found = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert begun == {"name": "pair"} and found["status"] == "needs a GPU" and found["reason"] == "two"
    assert found["status"] not in runner.BAD


def test_every_attention_and_float8_recipe_is_a_check_and_names_differ():
    names = [check.name for check in all_checks()]
    assert {f"{kind}:{name}" for kind in ("attention", "kernel") for name in KERNELS} < {*names}
    assert {f"fp8:{name}" for name in (*get_args(Fp8), "8k")} < {*names}
    assert len(names) == len({*names})


def wheel(folder, name, content=b""):
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(f"{name.split('-')[0]}/__init__.py", content)


def test_wheels_of_what_is_not_installed_are_unpacked(tmp_path):
    for name in ("pytest-1.0-py3-none-any.whl", "no_such_package-1.0-py3-none-any.whl"):
        wheel(tmp_path, name)
    gpu_check.unpack_wheels(tmp_path, tmp_path / "packages")
    assert [path.name for path in (tmp_path / "packages" / "all").iterdir()] == ["no_such_package"]


def test_a_package_that_must_lie_apart_is_there_for_its_check_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "APART", ("no_such_package",))
    monkeypatch.setenv(APART_VARIABLE, str(tmp_path / "packages" / "apart"))
    monkeypatch.setenv("PYTHONPATH", "/before")
    one = check("one", 1, package="no_such_package")
    assert one.refusal(cpu=True)["status"] == "not installed"
    wheel(tmp_path, "no_such_package-1.0-py3-none-any.whl")
    gpu_check.unpack_wheels(tmp_path, tmp_path / "packages")
    assert one.refusal(cpu=True) == {} and find_spec("no_such_package") is None
    with importable("no_such_package"):
        folder = str(tmp_path / "packages" / "apart" / "no_such_package")
        assert find_spec("no_such_package") is not None and os.environ["PYTHONPATH"] == f"/before:{folder}"
    assert folder not in sys.path and os.environ["PYTHONPATH"] == "/before"


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("small-1.0-py3-none-any.whl", 10, "bytes in all, of 60000000"),
        ("large-1.0-py3-none-any.whl", 61_000_000, "the wheels are too large to carry"),
        ("small_stable-1.0-cp310-abi3-manylinux_2_28_x86_64.whl", 10, "bytes in all, of 60000000"),
        ("built-1.0-cp312-cp312-linux_x86_64.whl", 10, "is built for one Python"),
    ],
)
def test_wheels_that_cannot_be_carried_are_refused(name, size, said, tmp_path):
    with (tmp_path / name).open("wb") as file:
        file.truncate(size)
    command = ["bash", str(SCRIPTS / "pack_gpu_check.sh"), "--no-download", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert said in done.stdout + done.stderr
    assert (done.returncode == 0) == name.startswith("small")
