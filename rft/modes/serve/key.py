"""The key of the servers of `mode=serve`, which every request carries.

Without it every user of the machine could call the endpoints of a server, also those for developers.
"""

import secrets
from collections.abc import Iterable

from rich.console import Console

from rft.remote.http_client import key_named

RUN_VARIABLE = "RFT_SERVE_KEY"  # in which a run gets the key where `serve.token` names no variable


def server_key(token: str | None) -> str:
    """The key in the variable that `serve.token` names; None: a random one, another one each time.

    Raises:
        ValueError: there is no such variable, or it is empty; names the option.
    """
    key = key_named(token, "serve")
    if key == "":
        raise ValueError(f"serve.token={token}: the environment variable is empty; set it to the key of the servers")
    return secrets.token_urlsafe(32) if key is None else key


def print_use(console: Console, lines: Iterable[str], token: str | None, key: str) -> None:
    """Prints how a run uses the servers, and gets a random key; one that the user has set is not printed."""
    said = "with the key of these servers in the variable, which is printed here alone:"
    key_lines = (said, f"    export {RUN_VARIABLE}={key}") if token is None else ()
    for line in (*lines, *key_lines):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
