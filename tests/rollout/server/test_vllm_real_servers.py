"""Real vLLM servers: sampling, new weights, and the death of one of two.

They run in the environment of the interpreter that RFT_VLLM_PYTHON names, or of this one.
"""

import asyncio
import copy
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rft.data.encode.tokenizer import characters
from rft.distributed import start
from rft.remote.http_client import RequestRefused
from rft.rollout.engine.base import Request
from rft.rollout.engine.sampling import truncate
from rft.rollout.server.options import Servers
from rft.rollout.server.vllm import FIXED, VLLMServers
from rft.rollout.server.weights import buckets
from rft.rollout.server.weights.buckets import Bucket
from rft.rollout.server.weights.version import WeightVersion
from tests.conftest import SOON_S
from tests.e2e.killed_servers import check_kills
from tests.helpers import engine_context, yaml_options
from tests.rollout.contexts import sampling_of_yaml
from tests.rollout.server.own_transfer import PLUGIN, use_gloo
from tests.rollout.server.real_servers import (
    QUIET,
    TOKEN,
    gone,
    interpreter,
    judges,
    key_of,
    leaks,
    memory_of,
    processes_of,
    shared_memory,
    until,
)
from tests.rollout.server.scripted import Announced, load_from_folder, tied_model
from tests.rollout.server.teacher_runs import check_columns, check_runs
from tests.rollout.server.ten_turns import gap_of_ten_turns

ARGUMENTS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
VOCABULARY = 30
PROMPT = [3, 8, 9, 12, 20, 4]


def how(**changes):
    return sampling_of_yaml(**changes)


@pytest.fixture(scope="module")
def model():
    return tied_model(VOCABULARY)


def started(model, folder, count, **arguments):
    """An engine whose servers are coming up."""
    python = interpreter("vllm") or pytest.skip("RFT_VLLM_PYTHON names no interpreter, and this one has no vllm")
    options = yaml_options("rollout/engine/servers/_base.yaml", count=count, python=python, poll_s=0.5)
    tokenizer = characters(alphabet="0123456789abcdefghijklmnop ")
    tokenizer.chat_template = "{{ messages[-1].content }}"
    context = engine_context(model, tokenizer, folder, start("cpu"), **ARGUMENTS, **arguments)
    return VLLMServers(VLLMServers.Options(servers=Servers(**options), merge_lora=True), context)


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    """Two real servers, which serve version 1: the model as it is. They leave nothing behind."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        made = started(model, tmp_path_factory.mktemp("run"), 2)
        try:
            made.update_weights(1, model.state_dict().items())
            patch.setenv(TOKEN, key_of(made))
            yield made
            own = [number for server in made._servers for number in processes_of(server.client.port)]
            held = shared_memory(own)
        finally:
            made.close()
    assert len(own) >= 6 and len(held) >= 4, "of each a server, its engine, and what tidies up"
    assert gone(own) and not [file for file in held if file.exists()]


def trained(model, prompt, completion, sampling=None):
    """What the model says of the sampled tokens, (L,)."""
    sampling = sampling or how()
    ids = torch.tensor([prompt + completion.tokens])
    weights = (model(ids).logits[0, len(prompt) - 1 : -1] / (sampling.temperature or 1.0)).softmax(-1)
    weights = truncate(weights, sampling.top_k, sampling.top_p, sampling.min_p)
    shares = weights / weights.sum(-1, keepdim=True)
    return shares.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0].log()


def gap(model, requests, found, sampling=None):
    """The largest difference between the log-probabilities of the engine and of the model."""
    return max(
        (trained(model, request.prompt, completion, sampling) - torch.tensor(completion.logprobs)).abs().max().item()
        for request, group in zip(requests, found, strict=True)
        for completion in group
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.1, "top_k": 9, "temperature": 0.7},
        {"top_k": 8, "top_p": 0.9},
    ],
    ids=str,
)
def test_log_probabilities_are_those_of_the_distribution_that_tokens_are_drawn_from(engine, model, changes):
    requests = [Request(PROMPT, list(range(24))), Request([7], [2**63 - 1])]
    found = engine.generate(requests, how(**changes))
    assert gap(model, requests, found, how(**changes)) < 1e-5
    assert len({tuple(completion.tokens) for completion in found[0]}) > 12


@pytest.mark.slow
def test_greedy_tokens_are_the_most_likely_and_carry_plain_log_probabilities(engine, model):
    requests = [Request(PROMPT, [1]), Request([7, 9], [2])]
    found = engine.generate(requests, how(temperature=0.0, top_k=3))
    assert gap(model, requests, found) < 1e-5
    for request, [completion] in zip(requests, found, strict=True):
        best = model(torch.tensor([request.prompt + completion.tokens])).logits[0, len(request.prompt) - 1 : -1]
        assert best.argmax(-1).tolist() == completion.tokens


@pytest.mark.slow
def test_such_servers_hide_their_key_and_answer_nothing_without_it(engine):
    assert leaks(engine) == set()


@pytest.mark.slow
def test_such_a_server_is_a_judge(engine, model):
    assert judges(engine, model)


@pytest.mark.slow
def test_dialogues_of_ten_turns_have_the_log_probabilities_of_the_model(engine, model):
    assert gap_of_ten_turns(engine, model, how(max_new_tokens=22)) < 1e-5


@pytest.mark.slow
def test_such_servers_are_a_teacher(engine, model, tiny, tmp_path):
    model.save_pretrained(tmp_path / "teacher")
    engine.context.tokenizer.save_pretrained(tmp_path / "teacher")
    addresses = [f"{server.client.host}:{server.client.port}" for server in engine._servers]
    check_columns(addresses, tmp_path / "teacher", engine.context.tokenizer)
    runs = ("algorithm=distill", "steps=2"), ("algorithm=on_policy_distill", "warmup=none", "steps=1")
    check_runs(addresses, tmp_path / "teacher", tiny, tmp_path, *runs)


@pytest.mark.slow
def test_a_sample_depends_on_its_seed_alone_and_ends_at_its_end(engine):
    [group] = engine.generate([Request(PROMPT, list(range(200)))], how())
    [again] = engine.generate([Request(PROMPT, list(range(199, -1, -1)))], how())
    assert [c.tokens for c in group] == [c.tokens for c in reversed(again)]
    ends = {completion.tokens[-1] for completion in group if completion.finish_reason == "stop"}
    assert ends == {1, 5, 6}, "end tokens of the tokenizer and of the generation config"
    for completion in group:
        assert not {1, 5, 6} & set(completion.tokens[:-1])
        assert completion.finish_reason == "stop" or len(completion.tokens) == 24
        assert completion.versions == [1] * len(completion.tokens)


@pytest.mark.slow
def test_limits_and_stop_strings_end_a_sample(engine):
    [group] = engine.generate([Request(PROMPT, [3, 4, 5], limits=[1, 2, 300])], how())
    assert [len(c.tokens) <= most for c, most in zip(group, (1, 2, 24), strict=True)] == [True] * 3
    [group] = engine.generate([Request(PROMPT, list(range(60)))], how(stop=["7", "cd"]))
    cut = [c for c in group if c.finish_reason == "stop" and c.tokens[-1] not in (1, 5, 6)]
    assert len(cut) > 5
    seven = engine.context.tokenizer.convert_tokens_to_ids("7")
    for completion in group:
        assert "7" not in completion.text and "cd" not in completion.text
        assert seven not in completion.tokens[:-1]
    assert any(c.tokens[-1] == seven for c in cut)


@pytest.mark.slow
def test_new_weights_are_served_and_old_prefixes_forgotten(engine, model, monkeypatch):
    long = [3 + number * 7 % 26 for number in range(180)]  # more than a block of keys and values
    requests = [Request(long, [1, 2, 3]), Request(PROMPT, [4, 5, 6])]
    whole = 2 * sum(weight.nbytes for weight in model.state_dict().values()) / 2**20  # to two servers
    for version, transport, part in (
        (2, "folder", ""),
        (3, "ipc", ""),
        (4, "ipc", "1.self_attn.q_proj"),
        (5, "group", ""),
        (6, "group", "0.mlp.up_proj"),
    ):
        if transport != engine.options.servers.transport:
            for monitor in engine._pool._monitors:
                monitor.close_transport()
        monkeypatch.setitem(vars(engine.options.servers), "transport", transport)
        monkeypatch.setitem(vars(engine.options.servers), "deltas", transport == "group")
        before = gap(model, requests, engine.generate(requests, how()))
        for name, weight in model.named_parameters():
            if version == 6:
                weight.view(-1)[:7] += 3.0 * (part in name)
            else:
                weight += (0.05 + 0.1 * bool(part)) * torch.randn_like(weight) * (part in name)
        stale = gap(model, requests, engine.generate(requests, how()))
        monkeypatch.setitem(vars(engine.options.servers), "sleep", version < 4)
        engine.sleep()
        assert [up(engine, server.client) for server in engine._servers] == [version >= 4] * 2
        engine.update_weights(version, model.state_dict().items())
        found = engine.generate(requests, how())
        assert before < 1e-4 and stale > 1e-2
        assert gap(model, requests, found) < 1e-4
        if transport != "folder":
            sent = engine.health()["sent_mib"] / whole
            least, most = {4: (0.4, 0.6), 6: (0.0, 0.01)}.get(version, (0.99, 1.01))
            assert least < sent < most, "all, a layer, seven elements"
            assert not [pid for server in engine._servers for pid in processes_of(server.client.port) if memory_of(pid)]
        assert {number for group in found for c in group for number in c.versions} == {version}


@pytest.mark.slow
@pytest.mark.suite
def test_workers_without_the_receiver_get_weights_by_vllms_own_transfer(model, tmp_path, monkeypatch):
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", PLUGIN)
    monkeypatch.delitem(FIXED, "worker_extension_cls")
    use_gloo(monkeypatch)
    model, requests = copy.deepcopy(model), [Request(PROMPT, list(range(8)))]
    whole = sum(weight.nbytes for weight in model.state_dict().values()) / 2**20
    tensors, fail_at = Bucket.tensors, []

    def read(bucket):
        if bucket.names[0] in fail_at:
            monkeypatch.setattr(buckets, "BUCKET", 2**28)  # the next attempt loads all tensors at once
            time.sleep(1.0)  # until the workers wait for the message
            raise OSError(fail_at.pop())
        return tensors(bucket)

    monkeypatch.setattr(Bucket, "tensors", read)
    monkeypatch.setattr(buckets, "BUCKET", 1)  # so that each tensor has a bucket
    engine = started(model, tmp_path, 1, weight_transfer_config={"backend": "nccl"}, tensor_parallel_size=2)
    try:
        monkeypatch.setitem(vars(engine.options.servers), "transport", "group")
        port, leaders = engine._servers[0].client.port, []
        for version, part in enumerate(("", "", "1.self_attn.q_proj", ""), 1):
            if version == 2:  # some tensors of a fused layer have arrived
                fail_at.append("model.layers.1.self_attn.v_proj.weight")
            for name, weight in model.named_parameters():
                weight += 0.1 * torch.randn_like(weight) * (part in name)
            for number in processes_of(port) if version == 4 else ():
                os.kill(number, signal.SIGKILL)
            engine.update_weights(version, model.state_dict().items())
            leaders.append(processes_of(port)[0])
            found = engine.generate(requests, how())
            assert gap(model, requests, found) < 1e-4
            assert {number for group in found for c in group for number in c.versions} == {version}
            least, most = {2: (1.4, 2.0), 3: (0.4, 0.6)}.get(version, (0.99, 1.01))
            assert least < engine.health()["sent_mib"] / whole < most, "a part and then all; a layer; all"
        assert not fail_at and len({*leaders[:-1]}) == 1 and leaders[-1] not in leaders[:-1], "it was started twice"
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.suite
def test_experts_are_those_of_the_last_update(tmp_path, monkeypatch):
    """vLLM itself packs experts for the CPU at the first load only."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "initializer_range": 0.2}
    config = Qwen3MoeConfig(**sizes, **experts, vocab_size=VOCABULARY, head_dim=32, dtype="float32", eos_token_id=5)
    model, requests = Qwen3MoeForCausalLM(config).eval().requires_grad_(False), [Request(PROMPT, list(range(8)))]
    engine = started(model, tmp_path, 1)
    try:
        for version, transport, part in ((1, "folder", ""), (2, "group", ""), (3, "group", "1.mlp.experts")):
            monkeypatch.setitem(vars(engine.options.servers), "transport", transport)
            if version == 2:
                engine._pool._monitors[0].close_transport()
            for name, weight in model.named_parameters():
                weight += 0.1 * torch.randn_like(weight) * (part in name)
            engine.update_weights(version, model.state_dict().items())
            assert gap(model, requests, engine.generate(requests, how())) < 1e-4
    finally:
        engine.close()


@pytest.mark.slow
def test_weights_that_cannot_be_read_are_not_served(engine, model, tmp_path):
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "a.safetensors")
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[:-8])
    peer = engine._servers[0].client
    with pytest.raises(RequestRefused, match="collective_rpc"):
        asyncio.run(load_from_folder(engine._server_api, peer, WeightVersion(99, tmp_path, {}, None)))
    requests = [Request([number], [number]) for number in range(3, 19)]
    assert gap(model, requests, engine.generate(requests, how())) < 1e-4
    until(lambda: asyncio.run(engine._server_api.version(peer)) == engine.version, SOON_S)


@pytest.mark.slow
def test_samples_that_a_server_aborts_are_asked_for_again(engine, model):
    requests = [Request([number], list(range(8))) for number in range(3, 27)]

    def abort():
        threading.Thread(target=lambda: asyncio.run(engine._servers[0].client.post("/abort_requests"))).start()

    found = engine.generate(requests, how(max_new_tokens=100), seen := Announced(21, abort))
    assert seen.all_once(24, 8) and [len(group) for group in found] == [8] * 24
    assert gap(model, requests, found) < 1e-4


def up(engine, peer):
    try:
        return asyncio.run(engine._server_api.version(peer)) == engine.version
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.suite
def test_an_asynchronous_run_and_its_server_are_killed(sized, tmp_path):
    """RFT_SERVER_KILLS=10 kills the run ten times."""
    python = interpreter("vllm") or pytest.skip("RFT_VLLM_PYTHON names no interpreter, and this one has no vllm")
    check_kills(sized, tmp_path, python, int(os.environ.get("RFT_SERVER_KILLS", "1")))
