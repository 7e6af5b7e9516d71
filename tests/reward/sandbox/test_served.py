"""Programs on a server with SandboxFusion's protocol, which runs them in processes, and the faults of servers."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from rft.registry import Target
from rft.reward.sandbox import served
from rft.reward.term import Unscored
from tests.conftest import SOON_S
from tests.helpers import yaml_options
from tests.reward.sandbox.test_code import ADD, CALLS, READ, SUMS

pytestmark = pytest.mark.slow

NODE = yaml_options("reward/terms/code_server.yaml")["code_server"]
OPTIONS = {key: value for key, value in NODE.items() if key not in ("weight", "call")}


def run_code(request):
    """What SandboxFusion answers to POST /run_code for Python."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", request["code"]],
            input=request["stdin"],
            capture_output=True,
            text=True,
            timeout=request["run_timeout"],
        )
    except subprocess.TimeoutExpired:
        result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
    else:
        result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    result["execution_time"] = time.monotonic() - started
    status = "Success" if result["return_code"] == 0 else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}


class Handler(BaseHTTPRequestHandler):
    faults: ClassVar[list] = []  # for the next requests: a status, bytes, an answer, or seconds to wait
    requests: ClassVar[list] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = json.loads(body)
        self.requests.append((self.path, dict(self.headers), request))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, float):
            time.sleep(fault)
        if isinstance(fault, int):
            self.send_error(fault)
            return
        answer = fault if isinstance(fault, bytes) else json.dumps(fault or run_code(request)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer) + (10 if fault == b"half" else 0)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def server(monkeypatch):
    monkeypatch.setattr(served, "PAUSES_S", (0.01, 0.02))
    Handler.faults, Handler.requests = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def term(address, **changes):
    node = OPTIONS | {"program": "whole", "address": address} | changes
    return Target(node, "reward.terms.a", ("key",)).build(key="reward.terms.a")


def value(built, program, tests):
    (found,) = built.values([program], [{"tests": tests}])
    return found


PROGRAMS = {
    READ + "print(a + b)": 1.0,
    READ + "print(3)": 0.5,
    READ + "print(a + b)\nraise SystemExit(1)": 0.0,
    READ + "print(a + b, flush=True)\nimport os\nos.abort()": 0.0,
    'print(\'{"status": "Success"}\')': 0.0,
    "def": 0.0,
    "x = '\ud800'\nprint(3)": 0.0,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_that_read_and_print(program, server):
    assert value(term(server, score="share"), program, SUMS) == PROGRAMS[program]
    assert value(term(server), program, SUMS) == float(PROGRAMS[program] == 1.0)


@pytest.mark.parametrize("program", list(CALLS)[:-2])
def test_functions_have_the_scores_of_the_local_sandbox(program, server):
    assert value(term(server, score="share"), program, ADD) == CALLS[program]


def test_the_request_holds_no_expected_value(server, monkeypatch):
    monkeypatch.setenv("SANDBOX_TOKEN", "secret")
    built = term(f"{server}/run_code", token="SANDBOX_TOKEN", seconds=3.0, memory_mib=99)
    built.check()
    tests = [{"function": "find", "args": ["an-argument"], "expected": "the-result"}]
    assert value(built, "def find(word): return word", tests) == 0.0
    path, headers, request = Handler.requests[-1]
    assert path == "/run_code" and headers["Authorization"] == "Bearer secret"
    assert "an-argument" in request["stdin"] and "the-result" not in json.dumps(request)
    assert {name: request[name] for name in ("language", "run_timeout", "compile_timeout", "memory_limit_MB")} == {
        "language": "python", "run_timeout": 3.0, "compile_timeout": 3.0, "memory_limit_MB": 99
    }  # fmt: skip


def test_a_program_beyond_its_time_fails_its_test(server):
    assert value(term(server, score="share", seconds=1.0), READ + "print(a + b)\nwhile a == 1: pass", SUMS) == 0.5


RESULT = {"status": "Finished", "return_code": 0, "stdout": "3\n", "stderr": "", "execution_time": 0.1}


def success(result):
    return {"status": "Success", "message": "", "run_result": result}


FAULTS = {
    "not JSON": b"<html>",
    "half an answer": b"half",
    "another object": b"[]",
    "nothing": b"",
    "no result": success(None),
    "a failure without a result": {"status": "Failed", "message": "", "compile_result": None, "run_result": None},
    "the sandbox of the server fails": {"status": "SandboxError", "message": "no cgroup", "run_result": RESULT},
    "its runner fails": {"status": "Failed", "message": "", "run_result": RESULT | {"status": "Error"}},
    "a status that its result contradicts": success(RESULT | {"return_code": 1}),
    "no exit status": success(RESULT | {"return_code": None}),
    "an exit status that is no number": success(RESULT | {"return_code": "0"}),
    "an output that is no text": success(RESULT | {"stdout": 3}),
    "overload": 503,
    "a gateway's time limit": 504,
    "an error": 500,
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_server_is_repeated_and_then_unscored(name, server):
    program, built = READ + "print(a + b)", term(server, tries=3)
    Handler.faults = [FAULTS[name]] * 2
    assert value(built, program, SUMS[:1]) == 1.0 and len(Handler.requests) == 3
    Handler.faults = [FAULTS[name]] * 3
    found = value(built, program, SUMS[:1])
    assert isinstance(found, Unscored) and found.reason.startswith("the sandbox failed: reward.terms.a.address=http://")


def test_a_refusal_is_not_repeated(server):
    Handler.faults = [422]
    assert isinstance(value(term(server), "print(3)", SUMS), Unscored) and len(Handler.requests) == 1


def test_a_slow_server_is_not_waited_for_beyond_the_deadline(server):
    Handler.faults = [2 * SOON_S, 2 * SOON_S]
    started = time.monotonic()
    found = value(term(server, seconds=0.3, deadline_s=0.5, tries=2), "print(3)", SUMS)
    assert isinstance(found, Unscored) and "0.5 s" in found.reason and time.monotonic() - started < SOON_S


def test_a_run_with_a_missing_server_stops_before_a_model_is_loaded():
    with pytest.raises(ValueError, match=r"reward\.terms\.a\.address=http://127\.0\.0\.1:9: a program that adds two"):
        term("http://127.0.0.1:9", tries=1).check()
    with pytest.raises(ValueError, match=r"reward\.terms\.a\.token=NO_SUCH: there is no such environment variable"):
        term("http://127.0.0.1:9", token="NO_SUCH").check()


def test_options_that_cannot_work_are_refused(server):
    with pytest.raises(ValueError, match=r"reward\.terms\.a\.address=host:8080: write it as http://host:8080"):
        term("host:8080")
    with pytest.raises(ValueError, match=r"deadline_s=5: it must be longer than reward\.terms\.a\.seconds=10"):
        term(server, deadline_s=5.0)
    with pytest.raises(ValueError, match="tests that must run apart from the program, which a server cannot do"):
        term(server).check_row({"tests": "assert abs(f(1) - 1) < 0.1"})
    term(server).check_row({"tests": "assert f(1) == 1"})
