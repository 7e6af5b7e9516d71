"""The steps of `.ci/run`: what they print, how they fail, and what they leave behind."""

import subprocess
from pathlib import Path

import pytest

from tests.conftest import ENDS_S

STEPS = Path(__file__).resolve().parents[3] / ".ci" / "steps.sh"
AWAIT = "await_file"  # a function that waits for a file, by which a step knows that another one has begun


@pytest.fixture
def script(tmp_path):
    """Starts a script with these steps; its folder is `tmp_path / "work"`."""
    started = []

    def start(text):
        (tmp_path / "work").mkdir()
        head = f"set -euo pipefail\nwork={tmp_path}/work\n. {STEPS}\n"
        head += f"{AWAIT}() {{ until [ -e $1 ]; do sleep 0.02; done; }}\n"
        process = subprocess.Popen(
            ["bash", "-c", head + text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process):
    """(the exit status, what was printed, and the rows of the table: {step: its seconds})."""
    said, _ = process.communicate(timeout=ENDS_S)
    text, _, table = said.rpartition("   start  seconds  step\n")
    return process.returncode, text, {line[19:]: int(line[9:17]) for line in table.splitlines()}


def test_steps_in_the_background_print_when_they_are_collected(script, tmp_path):
    front = """'pip install -e ".[dev]" && pytest'"""
    status, text, table = ended(script(f"start a echo of a\nstart b echo of b\nstep {front} sleep 1.1\nfinish"))
    assert status == 0
    assert [line for line in text.splitlines() if line.startswith("of")] == ["of a", "of b"]
    assert list(table) == ["a", "b", front.strip("'"), "the whole"]
    assert table[front.strip("'")] >= 1
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("kind", ["step", "start"])
def test_a_step_that_fails_is_named_and_ends_the_others(script, tmp_path, kind):
    first = f"{AWAIT} {tmp_path}/begun" if kind == "start" else "true"  # a step that fails ends before others start
    broken = f"broken() {{ {first}; echo said; false; echo not reached; }}"
    long = f"bash -c 'touch {tmp_path}/begun; sleep 1000'"
    status, text, table = ended(script(f"{broken}\n{kind} broken broken\nstart long {long}\nfinish\necho later"))
    assert status == 1
    assert text.endswith("\nsaid\n\n=== FAILED: broken\n\n")
    assert (
        list(table)
        == {
            "step": ["broken (status 1)", "the whole"],
            "start": ["broken (status 1)", "long (status 143)", "the whole"],
        }[kind]
    )
    assert not (tmp_path / "work").exists()


def test_a_step_that_is_killed_has_failed(script):
    status, text, table = ended(script("die() { kill -9 $BASHPID; }\nstart dead die\nfinish\necho later"))
    assert status == 1 and "=== FAILED: dead" in text and "later" not in text
    assert list(table) == ["dead (status killed)", "the whole"]


def test_two_steps_in_the_background_run_at_a_time(script, tmp_path):
    begun, done, third = (tmp_path / name for name in ("begun", "done", "third"))
    functions = f"a() {{ {AWAIT} {begun}; sleep 0.3; [ ! -e {third} ]; touch {done}; }}\n"
    functions += f"b() {{ touch {begun}; {AWAIT} {done}; }}\n"
    status, _, table = ended(script(f"{functions}start a a\nstart b b\nstart c touch {third}\nfinish"))
    assert status == 0 and list(table) == ["a", "b", "c", "the whole"]
    assert (tmp_path / "third").exists()


@pytest.mark.parametrize("moment", ["while it waits", "while it starts a step"])
def test_a_script_that_is_stopped_ends_its_steps_and_leaves_no_folder(script, tmp_path, moment):
    back = f"bash -c 'touch {tmp_path}/begun; sleep 1000'"
    front = f"front() {{ {AWAIT} {tmp_path}/begun; kill $$; sleep 1000; }}"
    # The script switches job control off once it has started a step.
    late = "set() { [ $BASHPID != $$ ] || sleep 0.3; builtin set $1; }" if moment == "while it starts a step" else ""
    status, text, table = ended(script(f"{front}\n{late}\nstart back {back}\nstep front front"))
    assert status == 143 and list(table) == ["back (status 143)", "front (status 143)", "the whole"]
    assert "Exit 143" not in text, "bash told of jobs that ended"
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_a_step_that_misses_a_signal_gets_another_one(script, tmp_path):
    deaf = "trap 'trap - TERM' TERM; touch begun; while true; do sleep 0.1; done"  # at first
    stop = f"stop() {{ {AWAIT} begun; kill $$; sleep 1000; }}"
    status, _, table = ended(script(f'cd {tmp_path}\n{stop}\nstart deaf bash -c "{deaf}"\nstep stop stop'))
    assert status == 143 and list(table) == ["deaf (status 143)", "stop (status 143)", "the whole"]
