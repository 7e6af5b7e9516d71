"""A plugin for SGLang's processes: workers check the token of a process group for weights, as vLLM's do in
`rft_receiver`, schedulers drop the embeddings of media with the cached prefixes, and servers read sounds without
torchaudio.

SGLang 0.5.15 loads plugins in each of its processes: functions that installed packages name as entry points. The folder
`rft_sglang_plugin-1.dist-info` beside this file names `register`, so that a server with these folders in PYTHONPATH
finds it. SGLang's request to join has no place for a token: both ends make it of the server's key and the name of the
group, which is another one for each group.
"""

import base64
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rft_receiver import TOKEN_GROUP, authenticate, group_token  # type: ignore[import-not-found]  # in the same folder
from rft_server_key import KEY_VARIABLE  # type: ignore[import-not-found]

JOIN = "sglang.srt.model_executor.model_runner.ModelRunner.init_weights_update_group"
FLUSH = "sglang.srt.managers.scheduler.Scheduler.flush_cache"
AUDIO = "sglang.srt.utils.common.load_audio"
WAV = "data:audio/wav;base64,"
HEAD = "<4sI4s4sIHHIIHH4sI"  # of a WAV whose samples follow its format
FLOATS, RATE = 3, 16000  # the format of floating-point numbers; samples per second that SGLang reads by default
TIMEOUT_S = 60.0
Joined = tuple[bool, str]  # whether it succeeded, and a message


def register() -> None:
    """Puts `check_members` around the function with which a worker joins a group, `drop_embeddings` behind the one with
    which a scheduler drops cached prefixes, and `read_samples` around the one that reads sounds."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]

    HookRegistry.register(JOIN, check_members, HookType.AROUND)
    HookRegistry.register(FLUSH, drop_embeddings, HookType.AFTER)
    HookRegistry.register(AUDIO, read_samples, HookType.AROUND)


def read_samples(read: Callable[..., Any], source: Any, rate: int | None = None, *given: Any, **options: Any) -> Any:
    """The samples (N,) of a sound as a run sends it: a WAV of 32-bit floating-point numbers at the rate of the model.

    SGLang imports torchaudio for every sound, whose rate it could change.

    Args:
        read: SGLang's own function, which takes all other sounds.
        source: a data: URL, or another form of a sound.
        rate: samples per second of the result; None for SGLang's default.
    """
    if isinstance(source, str) and source.startswith(WAV):
        data = base64.b64decode(source[len(WAV) :], validate=True)
        own, size = rate or RATE, struct.calcsize(HEAD)
        count = max(len(data) - size, 0)
        form = (b"fmt ", 16, FLOATS, 1, own, 4 * own, 4, 32)
        if data[:size] == struct.pack(HEAD, b"RIFF", size - 8 + count, b"WAVE", *form, b"data", count):
            return np.frombuffer(data, "<f4", offset=size).copy()
    return read(source, rate, *given, **options)


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
