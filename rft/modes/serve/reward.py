"""The server of reward terms of `mode=serve`. Runs use it with the term `remote` or with `call.workers=http`."""

import importlib.util
import signal
import socket
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any

from rich.console import Console

from rft.modes.serve.key import RUN_VARIABLE, print_use, server_key
from rft.reward.compose import OWN
from rft.reward.services.protocol import fingerprint
from rft.reward.thought import OPTIONS, ReadingOptions, split_node
from rft.setup.components import Components

REPORTED = "drop_row"  # of `call.failed`: the answer has the reason, and the run that asked decides


def serve_reward(parts: Components, console: Console) -> None:
    """Serves the terms of the reward until SIGINT or SIGTERM. The requests in flight are answered first.

    Args:
        parts: of the config.
        console: for messages.

    Raises:
        ValueError: the port is taken, the token or a package is missing, or a term is not ready; names the key.
    """
    options = parts.run.serve
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"mode=serve needs the package {package} for reward terms: pip install 'rft[serve]'")
    from rft.remote.http_server import make_server
    from rft.reward.serving.app import make_app

    key = server_key(options.token)
    parts.check_dependencies()
    node, reward = parts.config["reward"], parts.reward
    if reward.shard:
        raise ValueError(
            "reward.shard=true: mode=serve is one process, which holds whole models; set reward.shard=false"
        )
    check_failed(node)
    reward.leave_unscored()
    reward.check()
    parts.place_reward(parts.join())
    try:
        listening = socket.create_server((options.host, options.port), backlog=options.limits.requests)
    except OSError as error:
        raise ValueError(f"serve.port={options.port}, serve.host={options.host}: {error}; choose another") from error
    address = f"http://{options.host}:{options.port}"
    lines = (
        f"serving the reward terms {','.join(reward.names)} at {address}",
        "a run uses their sum with",
        f'    "reward/terms=[remote]" reward.accuracy=remote "reward.terms.remote.addresses=[{address}]"'
        f" reward.terms.remote.token={options.token or RUN_VARIABLE}",
    )
    print_use(console, lines, options.token, key)
    with closing(reward), suppress(KeyboardInterrupt):  # uvicorn raises SIGINT and SIGTERM again once it has ended
        app = make_app(reward, fingerprints(node), options.limits, key)
        server = make_server(app, options.limits, timeout_graceful_shutdown=options.limits.end_s)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a script ignores it
        server.run(sockets=[listening])
    console.print("stopped")


def check_failed(node: Mapping[str, Any]) -> None:
    """Refuses a reward that puts something in the place of a score.

    Raises:
        ValueError: names the key of the term.
    """
    nodes = {"reward": node, **{f"reward.terms.{name}": term for name, term in node["terms"].items()}}
    for key, one in nodes.items():
        failed = one.get("call", {}).get("failed", REPORTED)
        if failed not in ("stop", REPORTED):
            raise ValueError(
                f"{key}.call.failed={failed}: a server answers with the reason in the place of a score, and the run "
                f"that asks decides by its own call.failed; set {REPORTED} here"
            )


def fingerprints(node: Mapping[str, Any]) -> dict[str | None, str]:
    """The fingerprints of the terms of a reward by name, and of their sum, None; without the options of calls."""
    defaults = ReadingOptions(**{name: node[name] for name in OPTIONS})
    terms = {}
    for name, term in node["terms"].items():
        options, reading, _ = split_node(term, defaults, f"reward.terms.{name}")
        terms[name] = {key: value for key, value in options.items() if key != "call"} | asdict(reading)
    own = {name: {key: value for key, value in term.items() if key not in OWN} for name, term in terms.items()}
    of_sum = fingerprint({"terms": terms, "route": node["route"]})
    return {**{name: fingerprint(options) for name, options in own.items()}, None: of_sum}
