"""Tools of real servers of the package `mcp`: a program on standard streams, and a server on HTTP."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from rft.rollout.environment.adapters.mcp import Mcp, Server
from rft.rollout.environment.options import EnvironmentOptions, Environments
from tests.rollout.environment.scripted import OPTIONS, play

SERVER = str(Path(__file__).parent / "mcp_server.py")
PROGRAM = {"command": sys.executable, "args": [SERVER]}


def node(server, request_s=60.0, **others):
    target = f"{Mcp.__module__}.{Mcp.__name__}"
    return {"mcp": {"_target_": target, "servers": {"numbers": server, **others}, "request_s": request_s}}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def script(*answers):
    """Answers in their order, each but the last one with a call."""
    return lambda prompt: [*answers, "end"][prompt.count("</tool_call>")]


@pytest.fixture(scope="module")
def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = subprocess.Popen([sys.executable, SERVER, str(port)])
    for _ in range(200):
        with socket.socket() as line:
            if line.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    program.kill()
    program.wait()


def dialogues(answers, rows=1, **options):
    [*found], sampler = play(script(*answers), rows=[{"prompt": "Go."}] * rows, tool_deadline_s=None, **options)
    return [one for [one] in found], sampler


def outputs(trajectory):
    return [one["content"] for one in trajectory.episode["messages"] if one["role"] == "tool"]


@pytest.mark.parametrize("workers", ["inline", "process"])
def test_an_episode_has_a_program_of_its_own(workers):
    answers = [call("add", number=3), call("add", number=4, method="m"), call("close")]
    found, sampler = dialogues(answers, rows=2, classes=node(PROGRAM), workers=workers)
    for trajectory in found:
        assert trajectory.episode["failed"] is None
        assert outputs(trajectory) == ["3", "7", "closed nothing"]
    assert sampler.batches[0][0].startswith("[add close fails dies hangs] ")


def test_a_server_on_http_is_shared(address):
    [first, second], _ = dialogues([call("add", number=1)], rows=2, classes=node({"url": address}))
    assert first.episode["failed"] is None and second.episode["failed"] is None
    assert sorted(outputs(first) + outputs(second)) == ["1", "2"]


def test_failures_of_tools_are_read_by_the_model(address):
    answers = [call("fails"), call("add", number="x"), call("add"), call("hangs")]
    [found], _ = dialogues(answers, classes=node({"url": address}, request_s=5.0))
    assert found.episode["failed"] is None and found.episode["tool_failures"] == 4
    fails, wrong, missing, late = outputs(found)
    assert fails.startswith("error: call_tool raised RuntimeError: Error executing tool fails")
    assert "1 validation error" in wrong and missing == "error: the argument number is missing"
    assert late.startswith("error: call_tool raised MCPError: ") and "timed out" in late


def test_an_episode_whose_server_ends_has_no_score():
    [found], _ = dialogues([call("dies"), call("add", number=1)], classes=node(PROGRAM))
    assert ["Connection closed" in output for output in outputs(found)] == [True, True]
    assert (
        found.episode["failed"]
        == "RuntimeError: close raised RuntimeError: the server with the tool add ended in the episode"
    )


def checked(server, **others):
    options = EnvironmentOptions(classes=node(server, **others), **OPTIONS)
    return Environments.of(options).classes["mcp"].tools


def test_servers_that_do_not_answer_are_named():
    for server, reason in (
        ({"command": "no-such-program"}, "No such file"),
        ({"command": "true"}, "Connection closed"),
        ({"url": "http://127.0.0.1:9/mcp"}, "connection"),
    ):
        with pytest.raises(
            ValueError, match=rf"^environment\.classes\.mcp: servers\.numbers does not answer: .*{reason}"
        ):
            checked(server)


def test_tools_of_one_name_are_refused(address):
    with pytest.raises(ValueError, match=r"^environment\.classes\.mcp: two tools have one name \(add, .*add"):
        checked({"url": address}, again={"url": address})


def test_wrong_servers():
    for servers, message in (
        ({}, "servers is empty"),
        ({"a": Server()}, r"servers\.a: set command"),
        ({"a": Server(command="b", url="c")}, r"servers\.a: set command"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            Mcp(servers=servers, request_s=1.0)
