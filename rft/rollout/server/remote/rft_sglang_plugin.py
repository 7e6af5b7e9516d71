"""A plugin for SGLang's processes: workers check the token of a process group for weights, as vLLM's do in
`rft_receiver`, and schedulers drop the embeddings of media with the cached prefixes.

SGLang 0.5.15 loads plugins in each of its processes: functions that installed packages name as entry points. The folder
`rft_sglang_plugin-1.dist-info` beside this file names `register`, so that a server with these folders in PYTHONPATH
finds it. SGLang's request to join has no place for a token: both ends make it of the server's key and the name of the
group, which is another one for each group.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from rft_receiver import TOKEN_GROUP, authenticate, group_token  # type: ignore[import-not-found]  # in the same folder
from rft_server_key import KEY_VARIABLE  # type: ignore[import-not-found]

JOIN = "sglang.srt.model_executor.model_runner.ModelRunner.init_weights_update_group"
FLUSH = "sglang.srt.managers.scheduler.Scheduler.flush_cache"
TIMEOUT_S = 60.0
Joined = tuple[bool, str]  # whether it succeeded, and a message


def register() -> None:
    """Puts `check_members` around the function with which a worker joins a group, and `drop_embeddings` behind the one
    with which a scheduler drops cached prefixes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]

    HookRegistry.register(JOIN, check_members, HookType.AROUND)
    HookRegistry.register(FLUSH, drop_embeddings, HookType.AFTER)


def drop_embeddings(flushed: bool, *_: Any, **__: Any) -> bool:
    """Drops the embeddings of media, which SGLang keeps when its weights change.

    Args:
        flushed: what `flush_cache` returns.
    """
    from sglang.srt.managers import mm_utils  # type: ignore[import-not-found]

    if flushed and mm_utils.embedding_cache is not None:
        mm_utils.init_mm_embedding_cache(mm_utils.embedding_cache.max_size)
    return flushed


def check_members(
    join: Callable[..., Joined],
    runner: Any,
    address: str,
    port: int,
    offset: int,
    size: int,
    name: str,
    backend: str = "nccl",
) -> Joined:
    """Joins a group. One whose name asks for it is left again where a member has another token.

    Args:
        join: SGLang's own function, which takes all other arguments.
    """
    joined, message = join(runner, address, port, offset, size, name, backend)
    if not joined or not name.startswith(TOKEN_GROUP):
        return joined, message
    device = torch.device("cpu" if backend == "gloo" else runner.device)
    group, token = runner._model_update_group[name], group_token(name, os.environ[KEY_VARIABLE])
    try:
        authenticate(group, offset + runner.tp_rank, size, token, device, TIMEOUT_S)
    except RuntimeError as error:
        del runner._model_update_group[name]
        return False, str(error)
    return True, message
