"""Attacks on the sandbox: each is held, and no process of it is left."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import rft
from rft.reward.sandbox.sandbox import LAYERS, Sandbox
from tests.conftest import SOON_S
from tests.reward.sandbox.attacks import EXHAUST, HELD, OUTLIVE, source
from tests.reward.sandbox.isolated import LIMITS, alive, kill, left, none_left, options, processes

FORBIDDEN = "Operation not permitted|Permission denied|not implemented|not supported|No space left"


def start(layers=LAYERS):
    sandbox = Sandbox(options(require=list(layers)), layers=layers)
    try:
        sandbox.check()
    except ValueError as error:
        if "is not available" not in str(error) or not re.search(FORBIDDEN, str(error)):
            raise
        pytest.skip(f"this machine lacks a layer: {error}")
    return sandbox


@pytest.fixture(scope="module")
def sandbox():
    found = start()
    yield found
    found.close()


@pytest.fixture(scope="module")
def machine(tmp_path_factory, sandbox):
    """What attacks look for: a file, an environment variable, a port, a socket, and the processes of the trainer."""
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text("broken")
    os.environ["RFT_TEST_SECRET"] = "broken"
    name = f"rft-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        yield {
            "SECRET": str(secret),
            "REPOSITORY": str(Path(rft.__file__).parent),
            "PORT": port.getsockname()[1],
            "NAME": name,
            "PARENT": os.getpid(),
            "SERVER": sandbox._server.pid,
        }
    del os.environ["RFT_TEST_SECRET"]


AS_OTHERS = ("endless loop", "waits for input forever")  # of which there is a stricter or a simpler one


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in AS_OTHERS else []) for name in EXHAUST]
)
def test_a_program_that_exhausts_a_resource_is_ended(name, sandbox):
    statuses, program = EXHAUST[name]
    patient = replace(LIMITS, seconds=20.0, cpu_seconds=20)  # on a busy machine too, memory ends it first
    limits = replace(LIMITS, seconds=0.6) if "timeout" in statuses else patient
    outcome = sandbox.run(program, "", limits)
    assert outcome.status in statuses, outcome
    assert outcome.seconds < limits.seconds + SOON_S
    assert len(outcome.stdout) <= 64 * 1024 and len(outcome.stderr) <= 64 * 1024
    assert none_left(sandbox._server.pid)
    assert sandbox.run("print(1)", "").stdout == "1\n"


def broken(stdout):
    """The attempts that succeeded."""
    return [line for line in stdout.splitlines() if line.startswith("broken")]


@pytest.mark.parametrize("name", HELD)
def test_a_program_does_not_reach_what_is_outside(name, sandbox, machine):
    outcome = sandbox.run(source(HELD[name], **machine), "")
    assert outcome.status == "ok" and outcome.stdout.endswith("done\n"), outcome
    assert broken(outcome.stdout) == []
    assert none_left(sandbox._server.pid)
    assert alive(sandbox._server.pid) and Path(os.__file__).exists()
    assert sandbox.run("print(1)", "").stdout == "1\n"


@pytest.mark.parametrize("name", OUTLIVE)
def test_no_process_outlives_its_program(name, sandbox):
    outcome = sandbox.run(source(OUTLIVE[name]), "")
    assert outcome.status == "ok" and "done" in outcome.stdout, outcome
    assert none_left(sandbox._server.pid)


# Each layer alone, with the namespaces that every program needs, holds what it is there for.
ALONE = {"network": ("network",), "landlock": ("writes outside",), "seccomp": ("network", "system calls")}


@pytest.mark.parametrize(("layer", "name"), [(layer, name) for layer in ALONE for name in ALONE[layer]])
def test_each_layer_alone_holds_its_attacks(layer, name, machine):
    sandbox = start(("namespaces", layer))
    try:
        outcome = sandbox.run(source(HELD[name], **machine), "")
        assert outcome.status == "ok" and outcome.stdout.endswith("done\n"), outcome
        assert [line for line in broken(outcome.stdout) if "bind" not in line] == []  # a port that no one reaches
        assert none_left(sandbox._server.pid)
    finally:
        sandbox.close()


def test_without_seccomp_the_same_system_calls_reach_the_kernel(machine):
    """The attack is able to fail: what holds it above is the filter."""
    sandbox = start(("namespaces",))
    try:
        said = (
            sandbox.run(source(HELD["network"], **machine), "").stdout
            + sandbox.run(source(HELD["system calls"], **machine), "").stdout
        )
        assert "broken memfd_create" in said or "broken connect" in said
    finally:
        sandbox.close()


def test_programs_at_the_same_time_do_not_see_each_other(sandbox):
    writer = "import time\nopen('mark', 'w').write('x')\nprint(1, flush=True)\ntime.sleep(0.6)"
    reader = "import os, time\ntime.sleep(0.3)\nprint(os.listdir('.'))\nprint([n for n in range(2, 300) if alive(n)])"
    alive_there = (
        "import os\ndef alive(n):\n    try: os.kill(n, 0)\n    except OSError: return False\n    return True\n"
    )
    first, second = sandbox.run_many([(writer, ""), (alive_there + reader, "")])
    assert first.stdout == "1\n" and second.stdout == "[]\n[2]\n"
    assert sandbox.run("import os\nprint(os.listdir('.'))", "").stdout == "[]\n"


def test_a_closed_sandbox_ends_what_runs():
    sandbox = start()
    server, found = sandbox._server.pid, []
    thread = threading.Thread(target=lambda: found.append(sandbox.run("import time\ntime.sleep(60)", "")))
    thread.start()
    while len(left(server)) < 3:  # supervisor, process 1, program
        time.sleep(0.01)
    sandbox.close()
    thread.join(5.0)
    assert not thread.is_alive() and found[0].status == "refused"
    assert none_left(server)


TRAINER = """
import sys
from rft.reward.sandbox.sandbox import Sandbox
from tests.reward.sandbox.isolated import options
sandbox = Sandbox(options())
sandbox.check()
print(sandbox._server.pid, flush=True)
sandbox.run("import time\\ntime.sleep(60)", "")
"""


def test_a_killed_trainer_leaves_no_process():
    start().close()  # skips where a layer is missing
    root = str(Path(rft.__file__).parent.parent)
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, cwd=root) as trainer:
        server = int(trainer.stdout.readline())
        while len(left(server)) < 3:  # supervisor, process 1, program
            time.sleep(0.01)
        trainer.kill()
    assert none_left(server)
    assert server not in processes()


def test_a_killed_fork_server_ends_what_runs_and_is_started_anew():
    sandbox = start()
    server, found = sandbox._server.pid, []
    thread = threading.Thread(target=lambda: found.append(sandbox.run("import time\ntime.sleep(60)", "")))
    thread.start()
    while len(left(server)) < 3:
        time.sleep(0.01)
    kill(server)
    thread.join(5.0)
    assert not thread.is_alive() and found[0].status == "refused"
    assert none_left(server)
    assert sandbox.run("print(1)", "").stdout == "1\n" and sandbox._server.pid != server
    sandbox.close()
