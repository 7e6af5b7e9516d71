"""What tests of real servers share: the interpreters that have them, their processes and their shared memory."""

import asyncio
import contextlib
import importlib.util
import os
import sys
import time
import urllib.request
from pathlib import Path

from rft.remote.http_client import RequestRefused, ServerClient
from rft.remote.retry import BreakerOptions
from rft.reward.models.grade import Grade
from rft.reward.services.judge_server import ServedJudge, ServedJudgeOptions
from rft.rollout.server.remote.rft_shared_memory import NAME
from tests.conftest import alive

TOKEN = "RFT_T_KEY"  # the environment variable into which tests write the key of a server
SHARED = Path("/dev/shm")
QUIET = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def interpreter(package):
    """What RFT_VLLM_PYTHON or RFT_SGLANG_PYTHON names, or this one where it has the package; empty where none has."""
    named = os.environ.get(f"RFT_{package.upper()}_PYTHON", sys.executable if importlib.util.find_spec(package) else "")
    return named if Path(named).is_file() else ""


def judges(engine, model):
    """Whether the server of an engine, asked in chat for one token, says what a model finds most likely."""
    question, grade = {"text": "{prompt}{response}", "words": ["a", "b"]}, {"pattern": r"^(.*)$", "unparsed": -1.0}
    peer = engine._servers[0].client
    name = engine._loop.run(peer.get("/v1/models"))["data"][0]["id"]
    addresses, breaker = [f"http://{peer.host}:{peer.port}/v1"], BreakerOptions(failures=5, pause_s=10.0)
    judge = ServedJudge("judge", ServedJudgeOptions(addresses, name, question, grade, None, 1, {}, TOKEN, breaker))
    judge.check()
    said = {}
    for text in map(str, range(40)):
        best = model(engine.context.tokenizer(f"3a{text}", return_tensors="pt").input_ids).logits[0, -1].argmax()
        if int(best) not in (1, 5, 6):  # these end a text
            said[text] = engine.context.tokenizer.decode([int(best)])
    graded = [Grade(**grade, words=["a", "b"], key="")(text) for text in said.values()]

    async def judged():
        return [value for text in said for value in await judge.values([text], [{"prompt": "3a"}])]

    return len({*graded}) > 4 and asyncio.run(judged()) == graded


def key_of(engine):
    """The key of the servers that an engine has started."""
    return engine._servers[0].client._headers["Authorization"].removeprefix("Bearer ")


def leaks(engine):
    """What is wrong with the key of the server of an engine: paths that answer without it, command lines of its
    processes and logs that show it."""
    lines = [Path(f"/proc/{number}/cmdline") for number in processes_of(engine._servers[0].client.port)]
    files = [path for path in (*lines, engine._processes[0].log) if key_of(engine).encode() in path.read_bytes()]
    return {*open_paths(engine), *map(str, files)}


def open_paths(engine):
    """The paths of the server of an engine that answer without its key."""
    client, found = engine._servers[0].client, set()
    stranger = ServerClient.at(0, f"{client.host}:{client.port}")
    known = engine._loop.run(client.get("/openapi.json"))["paths"]
    assert len(known) > 20
    for path, method in ((path, method) for path, methods in known.items() for method in methods):
        try:
            engine._loop.run(stranger._call(method.upper(), path, b"{}"))
            found.add(path)
        except RequestRefused as error:
            found |= set() if error.unauthorized else {path}
    return found


def processes_of(port):
    """The server that listens at a port, and the processes that it has started."""
    words = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words[int(folder.name)] = (folder / "cmdline").read_bytes().split(b"\0")
    [leader] = [number for number, line in words.items() if line[1:2] == [b"-m"] and str(port).encode() in line]
    return [leader, *(number for number in words if number != leader and group_of(number) == leader)]


def group_of(number):
    """The process group of a process; None where it is gone."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(number)


def shared_memory(processes):
    """The files in /dev/shm that processes have mapped. A semaphore is mapped under another name than its own."""
    held = set()
    for number in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{number}/maps").read_text().splitlines()
            held |= {int(line.split()[4]) for line in lines if f" {SHARED}/" in line}
    return {SHARED / entry.name for entry in os.scandir(SHARED) if entry.inode() in held}


def opened_by(process):
    """What the descriptors of a process lead to; some may be closed meanwhile."""
    found = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return found


def memory_of(process):
    """What a process has of memory that `rft_shared_memory` shares: descriptors, and places where it is mapped."""
    links = set(opened_by(process))
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [text for text in (*links, *lines) if NAME in text]


def counted(client, name):
    """What a counter of a vLLM server says, the sum of its labels."""
    address, key = f"http://127.0.0.1:{client.port}/metrics", {"Authorization": client._headers["Authorization"]}
    with urllib.request.urlopen(urllib.request.Request(address, headers=key)) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def until(true, seconds):
    """Waits for something to be true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.1)


def gone(processes):
    """True where all processes have ended."""
    return not any(map(alive, processes))
