"""SGLang finds the plugin, whose workers join only groups of their token; a real one does so in
test_sglang_real_server.py."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from rft.rollout.server.remote.rft_receiver import TOKEN_GROUP, authenticate, group_token, join
from rft.rollout.server.remote.rft_server_key import KEY_VARIABLE
from rft.rollout.server.server_api import REMOTE


@pytest.fixture
def plugin(monkeypatch):
    """The module of the only entry point in the folder."""
    monkeypatch.syspath_prepend(REMOTE)
    monkeypatch.setenv(KEY_VARIABLE, "the-key")
    [entry] = [entry for found in distributions(path=[REMOTE]) for entry in found.entry_points]
    assert (entry.group, entry.dist.name) == ("sglang.srt.plugins", "rft_sglang_plugin")
    return entry.load().__globals__


def join_as_sglang(runner, address, port, offset, size, name, backend):
    """What SGLang's own function does."""
    store = TCPStore(address, port, is_master=False)
    runner._model_update_group[name] = join(store, name, offset + runner.tp_rank, size, backend, 10.0, "127.0.0.1")
    return True, "joined"


def test_embeddings_of_media_are_dropped_with_cached_prefixes(plugin, monkeypatch):
    cache = SimpleNamespace(max_size=7)
    utils = SimpleNamespace(embedding_cache=cache, init_mm_embedding_cache=lambda size: dropped.append(size))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", SimpleNamespace(mm_utils=utils))
    dropped = []
    assert plugin["drop_embeddings"](False, "scheduler") is False and dropped == []
    assert plugin["drop_embeddings"](True, "scheduler", empty_cache=True) is True and dropped == [7]


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        (f"{TOKEN_GROUP}1", "the-key", "joined"),
        (f"{TOKEN_GROUP}1", "another", "member 0 of the process group has another token"),
        ("rft-1", None, "joined"),
    ],
)
def test_a_worker_joins_a_group_of_its_token(plugin, name, key, message):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    runner = SimpleNamespace(tp_rank=0, device="cpu", _model_update_group={})

    def rank_zero():
        group = join(store, name, 0, 2, "gloo", 10.0, "127.0.0.1")
        if key is not None:
            authenticate(group, 0, 2, group_token(name, key), torch.device("cpu"), 10.0)
        return group  # without a reference it would close its connections, maybe while the worker still joins

    with ThreadPoolExecutor() as threads:
        trainer = threads.submit(rank_zero)
        found = plugin["check_members"](join_as_sglang, runner, "127.0.0.1", store.port, 1, 2, name, "gloo")
    assert found == (message == "joined", message)
    assert (name in runner._model_update_group) == (message == "joined")
    assert (trainer.exception() is None) == (message == "joined")
