"""Agents of every kind, which know nothing of the project: they get a row, an address and a key."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

TOOLS = [{
    "type": "function",
    "function": {"name": "price", "description": "A price.", "parameters": {
        "type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"],
    }},
}]  # fmt: skip


def fetch(base_url, api_key, path="/chat/completions", **body):
    """Status and JSON of a request."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body else None
    try:
        with urllib.request.urlopen(urllib.request.Request(base_url + path, data, headers)) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(base_url, api_key, messages, **more):
    """Adds the answer to the messages, and returns it."""
    status, body = fetch(base_url, api_key, model="any", messages=messages, **more)
    assert status == 200, body
    messages.append(body["choices"][0]["message"])
    return messages[-1]


def user(text):
    return {"role": "user", "content": text}


def one_turn(data, base_url, api_key):
    ask(base_url, api_key, [user(data["prompt"])])
    return 1.0


class Prepared:
    """Counts its episodes, which have processes of their own, forked from the one that has built it."""

    def __init__(self, *, most):
        if most < 0:
            raise ValueError(f"most={most} is below 0")
        self._most, self._process, self._played = most, os.getpid(), 0

    async def run(self, data, base_url, api_key):
        ask(base_url, api_key, [user(data["prompt"])])
        self._played += 1
        return self._most + self._played if self._process == os.getppid() else -1.0


async def in_many_ways(data, base_url, api_key, *, most=1.0):
    """Does what the row says."""
    way = data["way"]
    if way == "silent":
        return most
    ask(base_url, api_key, [user(data["prompt"])])
    if way == "raises":
        raise OSError("no such place")
    if way == "leaves":
        sys.exit(3)
    if way == "dies":
        os._exit(3)
    if way == "hangs":
        child = subprocess.Popen(["sleep", "60"])
        Path(data["pids"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(60)
    return {"text": "1", "nan": float("nan"), "none": None}.get(way, most)
