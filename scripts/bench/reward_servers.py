"""The server of the section `reward`, and plain requests to it."""

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.process import environment
from rft.remote.http_client import bearer, httpx
from rft.remote.server_process import free_port
from rft.reward.services.protocol import SCORE, score_body

ROWS = 64  # of a request
KEY = "RFT_BENCH_KEY"  # the environment variable with the token of the server
REQUESTS = 8  # at the same time


@contextmanager
def serving(options: dict[str, Any]) -> Iterator[str]:
    """Serves the rule `gsm8k` in another process, with a random token in `KEY`; gives its address."""
    os.environ[KEY] = secrets.token_urlsafe(32)
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "rft.main", "mode=serve", "reward/terms=[gsm8k]", "reward.accuracy=gsm8k"]
    command += [f"reward.terms.gsm8k.{name}={value}" for name, value in options.items()]
    with tempfile.TemporaryDirectory() as folder:
        command += [f"serve.port={port}", f"serve.token={KEY}", f"output_dir={folder}"]
        server = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            if not server.stdout.readline().startswith("serving"):
                raise RuntimeError(f"the server of rewards did not start: {server.communicate()[0]}")
            yield address
        finally:
            server.terminate()
            server.communicate()


def plain_posts(address: str, texts: list[str], rows: list[dict[str, Any]]) -> Callable[[], list[float]]:
    """Scores all texts by a loop of httpx that checks nothing, repeats nothing and keeps its connections."""

    async def post_all() -> list[float]:
        slots = asyncio.Semaphore(REQUESTS)

        async def post(client: Any, start: int) -> list[float]:
            chosen = slice(start, start + ROWS)
            async with slots:
                answer = await client.post(address + SCORE, json=score_body(texts[chosen], rows[chosen], None))
            return [result["total"] for result in answer.json()["results"]]

        async with httpx.AsyncClient(timeout=None, headers=bearer(os.environ[KEY])) as client:
            found = await asyncio.gather(*(post(client, start) for start in range(0, len(texts), ROWS)))
        return [score for scores in found for score in scores]

    return lambda: asyncio.run(post_all())
