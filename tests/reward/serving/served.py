"""A server of reward terms in a thread of the test, on a real port."""

import json
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

from rft.modes.serve.reward import fingerprints
from rft.remote.http_limits import ScoringLimits
from rft.remote.http_server import make_server
from rft.remote.server_process import free_port
from rft.reward.serving.app import make_app
from tests.conftest import SOON_S
from tests.reward.reward_of import reward_of

KEY = "secret"
THOUGHTS = {"reasoning": ["<think>", "</think>"], "prompt_opens": None, "include_prefill": False}
LIMITS = {"body_mib": 1.0, "request_s": SOON_S, "connections": 64, "rows": 64, "requests": 8, "end_s": 5}


@contextmanager
def served(terms, accuracy, limits=None):
    """Serves terms with the token `KEY`; gives the address."""
    reward, port = reward_of(terms, accuracy), free_port()
    marks = fingerprints({"terms": terms, "route": {}, **THOUGHTS})
    limits = ScoringLimits(**LIMITS | (limits or {}))
    app = make_app(reward, marks, limits, KEY)
    server = make_server(app, limits, port=port)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
        reward.close()


def ask(address, body=None, token=KEY, scheme="Bearer"):
    """The status and the JSON, or text, of an answer; without a token the request has no header."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {} if token is None else {"Authorization": f"{scheme} {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data, headers)) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    return status, json.loads(text) if text.startswith("{") else text


STARTED, GO, SIZES = threading.Event(), threading.Event(), []


def waits(completions, **columns):
    """A reward function that ends when the test lets it."""
    SIZES.append(len(completions))
    STARTED.set()
    GO.wait(SOON_S)
    return [1.0 for _ in completions]
