"""Environments of real servers of the package `openenv`."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("openenv")

from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.rollout.environment.adapters.openenv import OpenEnv
from rft.rollout.environment.options import EnvironmentOptions, Environments
from tests.rollout.environment.scripted import ALPHABET, OPTIONS, TEMPLATE, play

SERVER = str(Path(__file__).parent / "openenv_server.py")


@pytest.fixture(scope="module")
def start():
    """Starts servers; returns the address and the process of each."""
    programs = []

    def run(sessions):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        programs.append(subprocess.Popen([sys.executable, SERVER, str(port), str(sessions)]))
        for _ in range(1200):
            with socket.socket() as line:
                if line.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        return f"http://127.0.0.1:{port}", programs[-1]

    yield run
    for program in programs:
        program.kill()
        program.wait()


@pytest.fixture(scope="module")
def url(start):
    return start(8)[0]


def node(url, **options):
    target = f"{OpenEnv.__module__}.{OpenEnv.__name__}"
    common = {"action": "text", "action_fields": {}, "observation": "shown", "reset_fields": [], "headers": {}}
    return {"_target_": target, "url": url, "request_s": 20.0, **common, **options}


def episodes(write, rows, url, workers="inline", **options):
    found, sampler = play(write, {"game": node(url, **options)}, rows, workers=workers, tool_deadline_s=None)
    return [one for [one] in found], sampler


@pytest.mark.parametrize("workers", ["inline", "process"])
def test_an_episode_is_a_session(url, workers):
    """From the seed s each episode adds 6, 0 and 6; the rewards are (s+6)/10, none and (s+12)/10."""
    script = ["6", "0", "6"]
    rows = [{"prompt": "Go,", "seed": seed} for seed in (0, 1)]
    found, _ = episodes(
        lambda prompt: script[prompt.count("total")], rows, url, workers, action_fields={"factor": 1},
        reset_fields=["seed"],
    )  # fmt: skip
    for seed, one in enumerate(found):
        assert one.episode["failed"] is None and one.finish.reason == "stop"
        assert one.episode["rewards"] == pytest.approx([(seed + 6) / 10, 0.0, (seed + 12) / 10])
        assert one.episode["reward"] == pytest.approx((2 * seed + 18) / 10)
        shown = [message["content"] for message in one.episode["messages"] if message["role"] == "user"]
        assert shown == [f"Go, begin at {seed}", f'{{"total": {seed + 6}}}', f'{{"total": {seed + 6}}}']


def test_fields_of_the_yaml_are_in_each_action(url):
    [found], _ = episodes(lambda prompt: "5", [{"prompt": "Go,"}], url, action_fields={"factor": 3})
    assert found.episode["rewards"] == [1.5]


def test_a_server_that_ends_in_an_episode_leaves_it_without_a_score(start, url):
    """The episode of the other server continues, and is scored."""
    other, program = start(2)

    def write(prompt):
        if "dies" in prompt and "total" in prompt:
            program.kill()
            program.wait()
        return "6"

    classes = {"dies": node(other), "lives": node(url)}
    rows = [{"prompt": f"It {name},", "environment": name} for name in classes]
    [[dead], [alive]], _ = play(write, classes, rows, tool_deadline_s=None)
    assert dead.episode["failed"].startswith("ConnectionClosedError: step raised ConnectionClosedError")
    assert dead.episode["turns"] == 2 and dead.episode["reward"] is None
    assert alive.episode["failed"] is None and alive.episode["reward"] == pytest.approx(0.6 + 1.2)


def test_errors_of_the_server_leave_the_episode_without_a_score(url):
    for write, options, message in (
        ("x", {}, "the server answers step with EXECUTION_ERROR: no x"),
        ("6", {"action": "word"}, "the server answers step with VALIDATION_ERROR: "),
        ("6", {"observation": "text"}, "observation=text: the server's has the fields metadata, shown"),
        ("6", {"reset_fields": ["start"]}, "reset_fields: the row has no field 'start' (it has: prompt)"),
    ):
        [found], _ = episodes(lambda prompt, text=write: text, [{"prompt": "Go,"}], url, **options)
        assert message in found.episode["failed"] and found.episode["reward"] is None


def test_a_server_with_too_few_sessions_is_named(start):
    found, _ = episodes(lambda prompt: "6", [{"prompt": "Go,"}] * 2, start(1)[0])
    assert sorted(one.episode["failed"] is None for one in found) == [False, True]
    [failed] = [one.episode["failed"] for one in found if one.episode["failed"] is not None]
    assert "CAPACITY_REACHED" in failed and "max_concurrent_envs of the server" in failed


def test_a_server_that_does_not_answer_is_an_error_at_the_start_of_the_run():
    environments = Environments.of(EnvironmentOptions(classes={"game": node("http://127.0.0.1:9")}, **OPTIONS))
    with pytest.raises(ValueError, match=r"^environment\.classes\.game: url=http://127.0.0.1:9: the server does not"):
        environments.check(Encoder(characters(alphabet=ALPHABET), TEMPLATE, None))


def test_wrong_urls():
    with pytest.raises(ValueError, match=r"^url='localhost:8000': expected that of a server"):
        options = {name: value for name, value in node("localhost:8000").items() if name != "_target_"}
        OpenEnv(**options)
