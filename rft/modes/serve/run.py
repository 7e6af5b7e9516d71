"""`mode=serve`: serves a model if the engine of `rollout` has servers, and the terms of `reward` otherwise."""

from typing import Any

from rich.console import Console

from rft.modes.serve.model import serve_model
from rft.modes.serve.reward import serve_reward
from rft.setup.components import Components


def serve(config: dict[str, Any], console: Console) -> float:
    """Serves until it is interrupted, and prints first what it serves.

    Args:
        config: the resolved config as plain containers.

    Raises:
        ValueError: lists all mistakes of the config, or names what cannot be served.
    """
    parts = Components(config)
    served = serve_model if parts.engine.factory.facts.servers else serve_reward
    served(parts, console)
    return 0.0
