"""The inference servers of `mode=serve`, for a checkpoint of a run or the model of `actor.path`.

Runs on other machines may sample with the servers and send them new weights. Servers of a model without weights
(`actor.model_config`) let requests wait until a run has sent weights.
"""

import asyncio
import shutil
import sys
import time
from pathlib import Path

from huggingface_hub import snapshot_download
from rich.console import Console

from rft.actor.forward.logits import vocabulary_size
from rft.actor.init import meta_model, read_config
from rft.actor.lora.base import find_adapter
from rft.data.encode.tokenizer import pretrained
from rft.modes.model import find_checkpoint
from rft.modes.serve.key import RUN_VARIABLE, print_use, server_key
from rft.remote.http_client import PROBE_S, ServerClient
from rft.remote.server_process import ServerProcess
from rft.rollout.engine.model_folder import write_model_folder
from rft.rollout.server.server_api import ServerApi, key_environment
from rft.setup.components import Components
from rft.waits import Reminder

PAUSE_S = 1.0  # seconds between checks of the servers
START_S = 3600.0  # seconds in which all servers must have loaded their model
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def serve_model(parts: Components, console: Console) -> None:
    """Starts servers, prints how a run uses them, and monitors them until it is interrupted or one of them ends.

    Args:
        parts: of the config; the engine states `servers`.
        console: for messages.

    Raises:
        ValueError: names the key of what is missing; or a server has ended, with the end of its log.
    """
    run, options = parts.run, parts.run.serve
    python = options.python or sys.executable
    if shutil.which(python) is None:
        raise ValueError(f"serve.python={python}: there is no such program; give the path of an interpreter")
    output = Path(run.output_dir).resolve()
    checkpoint = find_checkpoint(output, options.checkpoint, "serve.checkpoint")
    path = parts.actor.options.path if checkpoint is None else str(checkpoint.resolve())
    tokenizer = parts.tokenizer.build() if path is None or parts.processor is not None else None
    processor = None if tokenizer is None else parts.make_processor(tokenizer)
    media = None if processor is None else processor.facts
    server_api = parts.engine.factory.server_api(run.rollout.engine_args, media)
    if path is None:
        assert tokenizer is not None
        model = output / "engine"
        size = vocabulary_size(tokenizer)
        model_config = read_config(None, parts.actor.options.model_config, size, "actor", media=media is not None)
        write_model_folder(meta_model(model_config), tokenizer, model, media)
    else:
        named = parts.tokenizer.options
        if checkpoint is None and named.get("path") != path:
            raise ValueError(
                f"actor.tokenizer={named}: mode=serve serves the tokenizer beside the model; save yours in the folder "
                "that actor.path names, and remove this"
            )
        model = local_model(path, "serve.checkpoint" if checkpoint is not None else "actor.path")
    load_format = "dummy" if path is None else "auto"
    key = server_key(options.token)
    addresses = [f"{options.host}:{options.port + number}" for number in range(options.count)]
    processes = []
    try:
        for number in range(options.count):
            command, environment = server_api.command(python, model, options.port + number, options.host, load_format)
            environment |= key_environment(key)
            processes.append(ServerProcess(command, environment, output / "servers" / f"{number}.log"))
        ready, began, reminder = False, time.monotonic(), Reminder()
        while True:
            for process in processes:
                if ended := process.ended():
                    raise ValueError(f"mode=serve: a server {ended}")
            up = [ready or _answers(server_api, address, key, hold=path is None) for address in addresses]
            if not ready and all(up):
                ready = True
                waits = "waiting for weights: no request is answered until a run sends them"
                lines = (
                    f"serving {path}" if path else waits,
                    f"addresses: {', '.join(addresses)}; a run samples there with",
                    f"    rollout={server_api.rollout} rollout.engine.servers.count=0 "
                    f"rollout.engine.servers.addresses=[{','.join(addresses)}]"
                    f" rollout.engine.servers.token={options.token or RUN_VARIABLE}",
                )
                print_use(console, lines, options.token, key)
            waited = 0.0 if ready else time.monotonic() - began
            names = ", ".join(address for address, answers in zip(addresses, up, strict=True) if not answers)
            if waited > START_S:
                raise ValueError(f"mode=serve: {names} did not answer within {START_S:g} s; see {output / 'servers'}")
            if waited > reminder.after_s:
                reminder.say(f"mode=serve waits for {names}; the logs are in {output / 'servers'}", waited)
            time.sleep(PAUSE_S)
    except KeyboardInterrupt:
        console.print("stopping the servers")
    finally:
        for process in processes:
            process.end()
        for process in processes:
            process.wait()


def local_model(path: str, key: str) -> Path:
    """The folder of a model with its weights; a model of the hub is downloaded to the hub's cache.

    Raises:
        ValueError: there is no such model, or it is no language model with weights; names the key.
    """
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(path, allow_patterns=HUB_FILES))
        except (OSError, ValueError) as error:
            raise ValueError(f"{key}={path}: no folder, and not found on the hub ({error})") from error
    if find_adapter(str(folder)) is not None:
        raise ValueError(
            f"{key}={path}: an adapter, and the servers need a whole model; merge it with scripts/convert.py merge, "
            "and set actor.path to the result"
        )
    pretrained(path=str(folder))
    read_config(str(folder), None, 0, "actor")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{key}={path}: {folder} has no weights (*.safetensors); give the folder of a whole model")
    return folder


def _answers(server_api: ServerApi, address: str, key: str, hold: bool) -> bool:
    """Whether a server is up. Where it has dummy weights (`hold`), it does not answer requests from then on."""

    async def ask() -> None:
        async with asyncio.timeout(PROBE_S):
            client = ServerClient.at(0, address, key=key)
            await server_api.healthy(client)
            if hold:
                await server_api.hold(client)

    try:
        asyncio.run(ask())
    except OSError:
        return False
    return True
