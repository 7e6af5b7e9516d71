"""`mode=serve`: starts inference servers for the model of this config. Runs on other machines send them weights."""

import asyncio
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from rft.actor.init import meta_model, read_config
from rft.remote.http_client import PROBE_S, ServerClient
from rft.remote.server_process import ServerProcess
from rft.rollout.engine.model_folder import write_model_folder
from rft.rollout.server.servable import ServableEngine
from rft.rollout.server.server_api import ServerApi
from rft.setup.components import Components

PAUSE_S = 1.0  # seconds between checks of the servers


def serve(config: dict[str, Any], console: Console) -> float:
    """Starts servers, prints how a run uses them, and monitors them until it is interrupted or one of them ends.

    Args:
        config: the resolved config as plain containers.

    Raises:
        ValueError: lists all mistakes of the config; or a server has ended, with the end of its log.
    """
    parts = Components(config)
    run, options = parts.run, parts.run.serve
    python = options.python or sys.executable
    if shutil.which(python) is None:
        raise ValueError(f"serve.python={python}: there is no such program; give the path of an interpreter")
    engine = parts.engine.factory
    if not issubclass(engine, ServableEngine):
        raise ValueError(
            f"mode=serve: rollout.engine._target_={engine.__name__} has no servers; choose a rollout that has, see "
            "docs/engines.md"
        )
    server_api = engine.server_api(run.rollout.engine_args)
    tokenizer = parts.tokenizer.build()
    model_config = read_config(run.actor["path"], run.actor["model_config"], len(tokenizer), "actor")
    folder = Path(run.output_dir).resolve() / "engine"
    write_model_folder(meta_model(model_config), tokenizer, folder)
    addresses = [f"{options.host}:{options.port + number}" for number in range(options.count)]
    processes = []
    try:
        for number in range(options.count):
            command, environment = server_api.command(python, folder, options.port + number, options.host)
            processes.append(ServerProcess(command, environment, folder.parent / "servers" / f"{number}.log"))
        ready = False
        while True:
            for process in processes:
                if ended := process.ended():
                    raise ValueError(f"mode=serve: a server {ended}")
            if not ready and all(_answers(server_api, address) for address in addresses):
                ready = True
                console.print(f"serving on {', '.join(addresses)}; a run samples there with", highlight=False)
                console.print(
                    f"    rollout={server_api.rollout} rollout.engine.servers.count=0 "
                    f"rollout.engine.servers.addresses=[{','.join(addresses)}]",
                    highlight=False, soft_wrap=True,
                )  # fmt: skip
            time.sleep(PAUSE_S)
    except KeyboardInterrupt:
        console.print("stopping the servers")
    finally:
        for process in processes:
            process.end()
        for process in processes:
            process.wait()
    return 0.0


def _answers(server_api: ServerApi, address: str) -> bool:
    async def ask() -> None:
        async with asyncio.timeout(PROBE_S):
            await server_api.healthy(ServerClient.at(0, address))

    try:
        asyncio.run(ask())
    except OSError:
        return False
    return True
