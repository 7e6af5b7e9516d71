"""Programs in the sandbox: how they end, what they read and write, and layers that a machine lacks."""

import json
import logging
import socket
from dataclasses import replace

import pytest

from rft.reward.sandbox.isolation.messages import read_message, write_message
from rft.reward.sandbox.sandbox import LAYERS, Sandbox, Spawned
from tests.conftest import SOON_S
from tests.reward.sandbox.isolated import LIMITS, none_left, options
from tests.reward.sandbox.test_sandbox_attacks import start


@pytest.fixture(scope="module")
def sandbox():
    found = start()
    yield found
    found.close()


ENDS = {
    "print(1)": ("ok", "1\n", ""),
    "import sys\nsys.exit(0)\nprint(1)": ("ok", "", ""),
    "print(1)\nexit(3)": ("error", "1\n", "exit status 3"),
    "import os\nprint(1, flush=True)\nos._exit(0)": ("ok", "1\n", ""),
    "1 / 0": ("error", "", "exit status 1"),
    "def": ("error", "", "exit status 1"),
    "a\0b": ("error", "", "exit status 1"),
    "x = '\ud800'": ("error", "", "exit status 1"),
    "import os\nos.abort()": ("killed", "", "SIGABRT"),
    "import ctypes\nctypes.string_at(0)": ("killed", "", "SIGSEGV"),
    "import os, sys\nos.write(1, bytes([255, 10]))": ("ok", "\ufffd\n", ""),
    "import threading\nthreading.Timer(0.1, print, ['late']).start()": ("ok", "late\n", ""),
    "import os\nos.closerange(0, 100)": ("ok", "", ""),
    "import os\nprint(1)\nos.closerange(0, 100)": ("error", "", "exit status 120"),  # Python cannot flush its stdout
    "if __name__ == '__main__': print(__import__('sys').argv)": ("ok", "['program.py']\n", ""),
    "import asyncio\nasyncio.run(asyncio.sleep(0))\nprint(2)": ("ok", "2\n", ""),
    "from dataclasses import dataclass\n@dataclass\nclass A:\n    b: 'int'\nprint(A(1))": ("ok", "A(b=1)\n", ""),
    "import tempfile\nprint(tempfile.TemporaryFile().write(b'ab'))": ("ok", "2\n", ""),
    "open('/tmp/a', 'w').close()\nprint(__import__('os').listdir())": ("ok", "['a']\n", ""),
    "open('a', 'w').write('b')\nprint(open('a').read())": ("ok", "b\n", ""),
    "import os\nprint(dict(os.environ), os.getcwd(), os.getuid())": ("ok", "{} /sandbox 1000\n", ""),
}


@pytest.mark.parametrize("program", ENDS)
def test_how_a_program_ends(program, sandbox):
    outcome = sandbox.run(program, "")
    assert (outcome.status, outcome.stdout, outcome.reason) == ENDS[program], outcome


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, "ok"),
        ({"nonce": "0" * 32}, "refused"),
        ({"nonce": ""}, "refused"),  # which the supervisor says of a program that it has not started alone
        ({"nonce": "", "status": "refused", "reason": "no room"}, "refused"),
    ],
)
def test_a_verdict_counts_with_the_nonce_that_no_program_has(changed, status):
    control, supervisor = socket.socketpair()
    spawned = Spawned(control, "print(1)", LIMITS)
    with supervisor:
        request, nonce = (json.loads(read_message(supervisor.fileno())) for _ in range(2))
        verdict = {"nonce": nonce, "status": "ok", "reason": "", "seconds": 0.5} | changed
        write_message(supervisor.fileno(), json.dumps(verdict).encode())
    assert request["program"] == "print(1)"
    ended = spawned.end()
    assert ended["status"] == status
    assert ("another nonce" in ended["reason"]) == (status == "refused" and "status" not in changed)


def test_a_traceback_is_that_of_the_program(sandbox):
    assert "ZeroDivisionError" in sandbox.run("1 / 0", "").stderr


def test_input_longer_than_a_pipe_arrives_whole(sandbox):
    text = "0123456789\n" * 100_000
    outcome = sandbox.run("import sys\nprint(len(sys.stdin.read()))", text)
    assert (outcome.status, outcome.stdout) == ("ok", "1100000\n")


def test_input_that_a_program_does_not_read_is_dropped(sandbox):
    assert sandbox.run("print(1)", "x" * 1_000_000).stdout == "1\n"


def test_output_up_to_the_limit_is_whole_and_one_byte_more_is_cut(sandbox):
    most = 64 * 1024
    assert sandbox.run(f"print('x' * {most - 1})", "").status == "ok"
    outcome = sandbox.run(f"print('x' * {most})", "")
    assert (outcome.status, outcome.stdout) == ("output", "x" * most)


def test_time_counts_from_the_start_of_the_program(sandbox):
    outcome = sandbox.run("import time\ntime.sleep(0.2)", "", replace(LIMITS, seconds=5.0))
    assert outcome.status == "ok" and outcome.seconds >= 0.2
    outcome = sandbox.run("import time\nprint(1, flush=True)\ntime.sleep(300)", "", replace(LIMITS, seconds=2.0))
    assert (outcome.status, outcome.stdout) == ("timeout", "1\n") and 2.0 <= outcome.seconds < SOON_S


def test_the_cpu_limit_counts_processor_time(sandbox):
    outcome = sandbox.run("while True: pass", "", replace(LIMITS, seconds=60.0, cpu_seconds=1))
    assert (outcome.status, outcome.reason) == ("timeout", "SIGXCPU")


MOUNTS = """
import json, os
for path in ("/", "/usr/lib", json.__file__, "/sandbox"):
    flags = os.statvfs(path).f_flag
    print(path == "/sandbox", bool(flags & os.ST_RDONLY), bool(flags & os.ST_NOSUID), bool(flags & os.ST_NODEV))
"""


def test_all_but_the_working_folder_is_mounted_read_only(sandbox):
    assert sandbox.run(MOUNTS, "").stdout == "False True True True\n" * 3 + "True False True True\n"


CAPABILITIES = """
import ctypes
libc = ctypes.CDLL(None)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[7] * 6)
bounding = [n for n in range(41) if libc.prctl(23, n, 0, 0, 0) != 0]
print(libc.capget(header, sets), *sets, bounding, libc.prctl(39, 0, 0, 0, 0))
"""


def test_a_program_has_no_capability_and_gets_no_new_privileges(sandbox):
    """capget: effective, permitted and inheritable; 23 is PR_CAPBSET_READ, 39 PR_GET_NO_NEW_PRIVS."""
    assert sandbox.run(CAPABILITIES, "").stdout == "0 0 0 0 0 0 0 [] 1\n"


def test_the_number_of_processes_is_exact(sandbox):
    program = "import os, time\nn = 0\ntry:\n    while os.fork(): n += 1\n    time.sleep(9)\nexcept OSError: print(n)"
    assert sandbox.run(program, "", replace(LIMITS, processes=5)).stdout == "4\n"


def test_outcomes_come_in_the_order_of_the_programs(sandbox):
    jobs = [(f"import time\ntime.sleep({0.2 if n == 0 else 0})\nprint({n}, input())", str(n)) for n in range(5)]
    assert [outcome.stdout for outcome in sandbox.run_many(jobs)] == [f"{n} {n}\n" for n in range(5)]
    assert none_left(sandbox._server.pid)


def test_sets_have_the_same_order_in_every_run(sandbox):
    said = {outcome.stdout for outcome in sandbox.run_many([("print(set('abcdefgh'))", "")] * 3)}
    assert len(said) == 1 and "'a'" in said.pop()


def test_random_numbers_differ_between_runs(sandbox):
    said = {outcome.stdout for outcome in sandbox.run_many([("import random\nprint(random.random())", "")] * 3)}
    assert len(said) == 3


def test_a_package_of_the_options_is_imported(tmp_path):
    (tmp_path / "answer.py").write_text("number = 42\n")
    tmp_path.chmod(0o755)
    sandbox = Sandbox(options(packages=[str(tmp_path)]))
    sandbox.check()
    assert sandbox.run("import answer\nprint(answer.number)", "").stdout == "42\n"
    assert "ModuleNotFoundError" in sandbox.run("import torch", "").stderr
    sandbox.close()


def test_a_missing_folder_of_packages_is_named():
    with pytest.raises(ValueError, match=r"a\.sandbox\.packages\[0\]=/no/such: there is no such folder; name another"):
        Sandbox(options(packages=["/no/such"]), "a.sandbox").check()


@pytest.mark.parametrize("layer", LAYERS)
def test_without_a_required_layer_no_program_runs(layer):
    sandbox = Sandbox(options(), "a.sandbox", [one for one in LAYERS if one != layer])
    with pytest.raises(ValueError, match=rf"a\.sandbox\.require: the layer {layer} is not available: switched off; "):
        sandbox.check()
    assert sandbox._server is None
    outcome = sandbox.run("print(1)", "")
    assert (outcome.status, outcome.stdout) == ("refused", "") and layer in outcome.reason


def test_a_layer_that_is_not_required_and_missing_is_logged(caplog):
    start().close()  # skips where a layer is missing
    sandbox = Sandbox(options(require=["namespaces"]), "a.sandbox", ["namespaces", "seccomp"])
    with caplog.at_level(logging.WARNING):
        sandbox.check()
    said = "a.sandbox runs programs without these layers: network (switched off), landlock (switched off)"
    assert [record.getMessage() for record in caplog.records] == [said]
    sandbox.close()


def test_namespaces_are_always_required():
    sandbox = Sandbox(options(require=[]), "a.sandbox", ["seccomp", "landlock"])
    with pytest.raises(ValueError, match="the layer namespaces is not available"):
        sandbox.check()
