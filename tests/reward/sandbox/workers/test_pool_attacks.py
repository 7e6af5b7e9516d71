"""Attacks on `workers: sandbox`: the function executes the response; the run and other calls are safe."""

import sys
import textwrap
import time
from pathlib import Path

import pytest

from rft.reward.sandbox.workers import pool as pool_module
from tests.conftest import SOON_S
from tests.reward.reward_of import reward_of
from tests.reward.sandbox.attacks import writes
from tests.reward.sandbox.isolated import alive, left, none_left
from tests.reward.sandbox.test_sandbox_attacks import machine, sandbox, start  # noqa: F401  # fixtures

pytestmark = pytest.mark.slow

FUNCTION = f"{Path(__file__).parent}/functions.py:executes"
LIMITS = {"cpu_seconds": 3, "memory_mib": 256, "processes": 8, "files_mib": 4, "files": 50, "output_kib": 64}
CALL = {"workers": "sandbox", "concurrency": 1, "deadline_s": 3.0, "failed": "drop_row", "sandbox": {"limits": LIMITS}}


def build(function=FUNCTION, **changes):
    start().close()  # skips where a layer is missing
    return reward_of({"a": {"function": function, "weight": 1.0, "call": CALL | changes}}, "a")


@pytest.fixture(scope="module")
def reward():
    made = build()
    yield made
    server = pool(made)._sandbox._server.pid
    made.close()
    assert none_left(server) and not alive(server)


def pool(reward):
    return reward._terms["a"].caller.runner


def scored(reward, *programs):
    """The scores of responses, with None for an unscored one, and the reasons."""
    found = reward.score([textwrap.dedent(one) for one in programs], [{"answer": "a"}] * len(programs))
    scores = [None if value != value else value for value in found.total.tolist()]
    return scores, [reasons.get("a") for reasons in found.unscored]


def processes(reward):
    return left(pool(reward)._sandbox._server.pid)


ATTEMPT = """
import os, sys
def holds(function):
    try:
        function()
    except (OSError, MemoryError, ImportError, ValueError):
        return True
    return False
"""
HELD = {  # each sets score to 1 if it was held
    "writes a file": "score = float(all(holds(lambda: open(p, 'w')) for p in (SECRET, '/x', os.__file__)))",
    "reads a file": "score = float(all(holds(lambda: open(p)) for p in (SECRET, '/etc/passwd', '/proc/1/environ')))",
    "reads the repository": "score = float(holds(lambda: open(REPOSITORY + '/../pyproject.toml')) and "
    "{*os.listdir(REPOSITORY + '/..')} <= {'rft', 'tests'})",
    "lists folders": "score = float(all(holds(lambda: os.listdir(p)) for p in ('/', '/etc', '/root', '/home')))",
    "connects": "import socket\nscore = float(holds(lambda: socket.create_connection(('127.0.0.1', PORT), 1)))",
    "sends": "import socket\nscore = float(holds(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))",
    "reads the environment": "score = float('RFT_TEST_SECRET' not in os.environ and 'HOME' not in os.environ)",
    "signals the run": "score = float(all(holds(lambda: os.kill(p, 0)) for p in (PARENT, SERVER)))",
    "starts a program": "score = float(holds(lambda: os.execv('/bin/sh', ['sh'])))",
    "sees processes": "score = float(holds(lambda: os.listdir('/proc')))",
    "becomes root": "score = float(holds(lambda: os.setuid(0)) and holds(lambda: os.chroot('/')))",
    "many files": "score = float(holds(lambda: [os.mkdir(str(n)) for n in range(100)]))",
    "a large file": "score = float(holds(lambda: open('f', 'wb').write(bytes(9 << 20))))",
    "memory": "score = float(holds(lambda: bytearray(10**12)))",
    "writes to descriptors": "for n in range(3, 100):\n    holds(lambda: os.fstat(n) and os.read(n, 1))\nscore = 1.0",
}


@pytest.mark.parametrize("name", HELD)
def test_a_response_does_not_reach_what_is_outside(name, reward, machine):  # noqa: F811
    known = "".join(f"{word} = {value!r}\n" for word, value in machine.items())
    assert scored(reward, ATTEMPT + known + HELD[name]) == ([1.0], [None])
    assert Path(machine["SECRET"]).read_text() == "broken"


def answers(content):
    """A program that writes a message in place of the worker's answer."""
    return f"import pickle, os\ntext = {content}\n{writes('len(text).to_bytes(4) + text')}os._exit(0)"


ENDED = {  # reasons, and the program
    "endless loop": (("deadline",), "while True: pass"),
    "endless loop that ignores signals": (
        ("deadline",),
        "import signal, time\nfor n in (2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(1)",
    ),
    "fork bomb": (("deadline", "memory"), "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    "memory in pieces": (("MemoryError", "memory"), "x = []\nwhile True: x.append(bytearray(10**6))"),
    "memory of many processes": (
        ("memory",),
        "import os, time\nfor _ in range(5):\n    if os.fork() == 0: break\nx = bytearray(90 << 20)\ntime.sleep(9)",
    ),
    "a huge value": (("output",), "score = {str(n): n for n in range(10**5)}"),
    "dies": (("worker_died",), "import os\nos._exit(3)"),
    "crashes": (("worker_died",), "import ctypes\nctypes.string_at(0)"),
    "kills its parent": (("worker_died",), "import os, signal, time\nos.kill(os.getppid(), 9)\ntime.sleep(9)"),
    "kills everything": (("worker_died",), "import os, signal, time\nos.kill(-1, 9)\ntime.sleep(9)"),
    "closes its pipe": (("worker_died",), "import os, time\nos.closerange(3, 100)\ntime.sleep(9)"),
    "leaves its pipe to a child": (
        ("worker_died",),
        "import os, time\nif os.fork() == 0: time.sleep(60)\nos._exit(0)",
    ),
    "answers with half a message": (("worker_died",), writes("b'00'") + "os._exit(0)"),
    "answers with a long message": (("output", "bad_answer"), writes("b'~~~~' + b'x' * 10**6") + "os._exit(0)"),
    "a pickle in place of an answer": (("bad_answer",), answers("pickle.dumps(os.system)")),
    "nested JSON": (("bad_answer",), answers("b'[' * 60000")),
    "a number of many digits": (("bad_answer",), answers("b'9' * 60000")),
    "an error of its own": (("other", "Mine"), "class Mine(Exception): pass\nraise Mine('\\x1b[2J' + 'x' * 9999)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDED)
def test_a_response_that_does_harm_has_no_score_and_the_next_one_has(name, reward):
    reasons, program = ENDED[name]
    started = time.monotonic()
    scores, found = scored(reward, program)
    assert scores == [None] and found[0] in reasons, found
    assert time.monotonic() - started < SOON_S
    assert scored(reward, "score = 0.25") == ([0.25], [None])


def test_a_response_that_uses_its_processor_time_has_the_reason_of_one_that_is_late():
    long = build(deadline_s=60.0, sandbox={"limits": LIMITS | {"cpu_seconds": 1}})
    assert scored(long, "while True: pass") == ([None], ["deadline"])
    long.close()


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_replaced(reward, monkeypatch):
    monkeypatch.setattr(pool_module, "GRACE_S", 1.0)
    stop = "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(60)"
    assert scored(reward, stop) == ([None], ["deadline"])
    assert scored(reward, "score = 0.5") == ([0.5], [None])


def test_an_object_with_a_method_reduce_is_not_unpickled(reward, tmp_path):
    """With `workers: process` the run would execute it."""
    mark = tmp_path / "mark"
    bomb = f"class Bomb:\n    def __reduce__(self): return (open, ({str(mark)!r}, 'w'))\nscore = Bomb()"
    assert scored(reward, bomb) == ([None], ["no_score"]) and not mark.exists()


POISON = """
    import builtins, json, os, time
    import rft.reward.sandbox.workers.worker as answer, rft.reward.sandbox.workers.worker as worker
    json.dumps = lambda value: '1e9'
    answer.encode = worker.encode = lambda found: b'1e9'
    builtins.exec = lambda *a: a[1].update(score=1e9)
    for name in ('json.py', 'poison'): open(name, 'w').write('x')
    os.mkdir('deep')
    os.chmod('deep', 0)
    if os.fork() == 0:
        os.setsid()
        while True: time.sleep(1)
    os._exit(0)
"""


def test_no_call_changes_the_next_one(reward):
    look = "import os\ndef seen(n):\n    try: os.kill(n, 0)\n    except OSError: return False\n    return True\n"
    look += "score = 100.0 * len(os.listdir('.')) + sum(seen(n) for n in range(2, 3000))"
    ((before,), _) = scored(reward, look)
    count = len(processes(reward))
    assert scored(reward, POISON)[0] == [None]
    assert scored(reward, look, look) == ([before, before], [None, None])  # this process and its parent alone
    assert len(processes(reward)) == count


def test_a_call_knows_nothing_of_the_rows_of_others(reward):
    first = "import sys\nsys.modules['kept'] = row\nopen('kept', 'w').write('x')\nscore = 0.0"
    then = "import os, sys\nscore = float('kept' in sys.modules or os.path.exists('kept'))"
    assert scored(reward, first, then)[0] == [0.0, 0.0]


def test_reasons_and_names_cannot_fill_the_log():
    reward = build()
    errors = [f"raise type('E{number}', (Exception,), {{}})('x')" for number in range(100)]
    reasons = set(scored(reward, *errors)[1])
    assert len(reasons) == 65 and "other" in reasons
    found = reward.score(["score = {'score': 1.0, **{f'n{n}': n for n in range(200)}}"], [{}])
    assert found.total.tolist() == [1.0] and len(found.numbers) == 64
    reward.close()


def test_the_run_does_not_import_the_file_of_the_function(tmp_path):
    mark, file = tmp_path / "mark", tmp_path / "hostile_import.py"
    file.write_text(
        f"try:\n    open({str(mark)!r}, 'w')\nexcept OSError:\n    pass\ndef f(response, row): return 1.0\n"
    )
    tmp_path.chmod(0o755)
    reward = build(f"{file}:f")
    assert scored(reward, "") == ([1.0], [None])
    assert not mark.exists() and not any("hostile_import" in name for name in sys.modules)
    reward.close()


IMPORTS = {
    "import os\nos._exit(0)": "the worker ended: ok",
    "raise KeyError('x')": r"cannot be imported \(KeyError: 'x'\)",
    "import os, sys\nos.write(2, b'x' * 10**6)\nraise SystemExit": "the worker ended",
    writes("b'~~~~' * 10**5"): "it answers with",
    "def f(text): pass": "its parameters .text. are of no known signature",
}


@pytest.mark.parametrize("text", IMPORTS)
def test_a_file_that_cannot_be_imported_is_an_error_before_the_run(text, tmp_path):
    (tmp_path / "broken.py").write_text(text + "\n")
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=IMPORTS[text]):
        build(f"{tmp_path}/broken.py:f")
