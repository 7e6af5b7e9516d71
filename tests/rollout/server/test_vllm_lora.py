"""Adapters that a vLLM server applies itself: a real one, where there is one, against the policy that trains.

It runs in the environment of the interpreter that RFT_VLLM_PYTHON names, or of this one.
"""

import asyncio
import zlib
from pathlib import Path

import pytest

from rft.actor.lora.base import Lora
from rft.distributed import start
from rft.rollout.server.options import Servers
from rft.rollout.server.vllm import VLLMApi, VLLMServers
from rft.setup.components import Components
from tests.actor.lora.lora_on_ranks import lora_options
from tests.conftest import SOON_S
from tests.helpers import engine_context, yaml_options
from tests.rollout.contexts import engine_check_context
from tests.rollout.engine.test_vllm_lora import PLAIN, REQUESTS, off, policy, redraw
from tests.rollout.server.fake_server import SERVER_INFO, FakeServer, answer_of, read_weights
from tests.rollout.server.real_servers import QUIET, interpreter, until
from tests.rollout.server.scripted import OPTIONS, SAMPLING, requests, said
from tests.rollout.server.test_vllm import answer

ARGUMENTS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 320}


@pytest.fixture
def engine(tmp_path):
    """A real server."""
    python = interpreter("vllm") or pytest.skip("RFT_VLLM_PYTHON names no interpreter, and this one has no vllm")
    servers = Servers(**yaml_options("rollout/engine/servers/_base.yaml", python=python, poll_s=0.2))
    actor, lora = policy(), Lora(**lora_options(rank=4))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        context = engine_context(actor.plain_model(), actor.tokenizer, tmp_path, start("cpu"), lora, **ARGUMENTS)
        made = VLLMServers(VLLMServers.Options(servers=servers, merge_lora=False), context)
        try:
            yield made
        finally:
            made.close()


def inodes(engine):
    """The files with weights that are there: of the model, and of adapters."""
    found = {path.stat().st_ino: path for path in engine._weight_store.folder.rglob("*.safetensors")}
    whole = {inode for inode, path in found.items() if path.name.startswith("model")}
    return whole, found.keys() - whole


@pytest.mark.slow
@pytest.mark.suite
def test_after_every_update_a_server_samples_what_the_policy_computes(engine):
    """Also behind a prompt whose keys and values the adapters before have left in the cache."""
    actor, before, base = policy(), None, None
    for version in (1, 2, 3):
        redraw(actor, version)
        engine.update_weights(version, actor.weights())
        found = engine.generate(REQUESTS, PLAIN)
        assert {number for group in found for answer in group for number in answer.versions} == {version}
        assert off(actor, found) < 1e-4
        assert before is None or off(actor, before) > 0.1, "adapters that change nothing"
        whole, adapters = inodes(engine)
        assert base in (None, whole) and len(adapters) == 1, "the weights beside them are written once"
        before, base = found, whole
    peer = engine._servers[0].client
    asyncio.run(peer.post_raw("/v1/unload_lora_adapter", {"lora_name": engine._request_fields["model"]}))
    until(lambda: asyncio.run(engine._server_api.version(peer)) == 3, SOON_S)
    assert off(actor, engine.generate(REQUESTS, PLAIN)) < 1e-4, "adapters that another client has unloaded"
    actor.copy_weights_from(policy(seed=1))
    redraw(actor, 4)
    engine.update_weights(4, actor.weights())
    assert off(actor, engine.generate(REQUESTS, PLAIN)) < 1e-4, "other weights beside them"
    engine.update_weights(4, [*actor.weights()])
    assert not engine._request_fields and inodes(engine)[1] == set(), "whole weights, not adapters"
    assert off(actor, engine.generate(REQUESTS, PLAIN)) < 1e-4


class AdapterServer(FakeServer):
    """Applies adapters; what it says of a sample shows which."""

    def __init__(self, port=0):
        self.adapters = {}
        super().__init__(port)

    @property
    def weights(self):
        return self.base, *self.adapters.values()

    @weights.setter
    def weights(self, base):
        self.base = base

    def perform(self, path, body, fault):
        if path.startswith("/server_info"):
            return 200, {"vllm_config": SERVER_INFO["vllm_config"] | {"lora_config": {"max_lora_rank": 8}}}
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in ("m", *self.adapters)]}
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = read_adapter(body["lora_path"])
        elif path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        elif path == "/inference/v1/generate":
            status, found = super().perform(path, body, fault)
            return (status, found | {"model": body["model"]}) if body["model"] in self.adapters else (404, {})
        else:
            return super().perform(path, body, fault)
        return 200, {}


def read_adapter(folder):
    return zlib.crc32((Path(folder) / "adapter_model.safetensors").read_bytes())


@pytest.fixture
def faked(tmp_path):
    """An engine and the server that it samples with."""
    server, lora = AdapterServer(), Lora(**lora_options(rank=4))
    options, actor = Servers(**OPTIONS | {"addresses": [server.address], "sync_s": 1.0, "poll_s": 0.01}), policy()
    context = engine_context(actor.plain_model(), actor.tokenizer, tmp_path, start("cpu"), lora)
    made = VLLMServers(VLLMServers.Options(servers=options, merge_lora=False), context)
    yield made, server, actor
    made.close()
    server.kill()


def committed(engine, asked):
    """Whether samples are of the current weights and adapters alone."""
    now = engine._weight_store.kept
    held = read_weights(now.folder), read_adapter(now.adapter.folder)
    expected = [[answer_of(r.prompt, seed, SAMPLING.max_new_tokens, held)[:2] for seed in r.seeds] for r in asked]
    return said(engine.generate(asked, SAMPLING)) == expected


@pytest.mark.parametrize(
    "message",
    [
        "/v1/load_lora_adapter",
        *(pytest.param(path, marks=pytest.mark.slow) for path in ("/v1/models", "/v1/unload_lora_adapter")),
    ],
)
def test_a_message_about_adapters_that_fails_once(faked, message):
    engine, server, actor = faked
    for version, fault in enumerate([None, None, "lose", "twice", 400, "never"]):
        redraw(actor, version)
        loads, calls, server.faults[message] = server.calls["/collective_rpc"], server.calls[message], [fault]
        engine.update_weights(version, actor.weights())
        assert server.calls[message] > calls or version == 0
        assert fault is not None or (server.calls["/collective_rpc"] > loads) == (version == 0), "adapters alone"
        assert committed(engine, requests(2)), fault
        assert len(server.adapters) == 1


def test_adapters_are_given_to_a_server_that_is_back_as_they_were_written(faked):
    engine, server, actor = faked
    engine.update_weights(1, actor.weights())
    server.kill()
    back = AdapterServer(server.port)
    try:
        assert committed(engine, requests(2)) and back.base == read_weights(engine._weight_store.kept.folder)
        back.adapters.clear()
        assert committed(engine, requests(2)), "they were taken away"
        actor.copy_weights_from(policy(seed=1))
        engine.update_weights(2, actor.weights())
        assert committed(engine, requests(2)), "other weights beside them"
        path = engine._weight_store.kept.adapter.folder / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(OSError, match=r"adapter_model.safetensors is not what was written to it"):
            engine._weight_store.kept.verify()
    finally:
        back.kill()


@pytest.mark.parametrize(("model", "version"), [("rft-1", 7), ("rft-2", None), ("m", None)])
def test_a_sample_without_the_adapter_of_its_version_is_none_of_ours(model, version):
    stamp = {"weight_versions": [{"version": "7+rft-1", "start": 0, "end": 2}]}
    assert VLLMApi({}).parse(answer(**stamp) | {"model": model}).versions == [version, version]


def test_servers_are_started_for_adapters_where_they_are_asked_for():
    command, environment = VLLMApi({"enable_lora": True}).command("python", Path("m"), 1)
    assert "--enable-lora" in command and environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in VLLMApi({}).command("python", Path("m"), 1)[1]


def test_the_options_say_whether_adapters_are_merged(resolved):
    Components(resolved("rollout=vllm_server", "actor/lora=lora", "rollout.engine.merge_lora=false"))


@pytest.mark.parametrize(
    ("servers", "changes", "message"),
    [
        ({}, {"lora": None}, r"merge_lora=false: the policy has no adapters; set actor/lora=lora"),
        ({}, {"media": True}, r"rollout\.engine\.merge_lora=false: adapters beside the weights are for models of text"),
        (
            {},
            {"engine_args": {"max_lora_rank": 8}},
            r"engine_args.max_lora_rank: it follows from actor.lora; take it out",
        ),
        ({"transport": "group"}, {}, r"transport=group: servers read adapters"),
        ({"sleep": True}, {}, r"sleep=true: sleeping servers discard the base weights"),
    ],
)
def test_what_servers_cannot_do_with_adapters_is_refused(servers, changes, message):
    options = VLLMServers.Options(servers=Servers(**OPTIONS | {"count": 1} | servers), merge_lora=False)
    with pytest.raises(ValueError, match=message):
        options.check(engine_check_context(PLAIN, **{"lora": Lora(**lora_options()), **changes}))
