"""What an SGLang server is told and what it says; test_sglang_real_server.py runs a real one."""

import asyncio
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from rft.distributed import start
from rft.errors import Problems
from rft.remote.http_client import BadResponse, ServerClient
from rft.rollout.engine.sampling import FirstToken
from rft.rollout.server.options import Servers
from rft.rollout.server.server_api import Aborted, ServerPrompt
from rft.rollout.server.sglang import SGLangApi, SGLangServers
from rft.rollout.server.weights.version import WeightVersion
from rft.setup.components import Components
from tests.helpers import yaml_options
from tests.rollout.contexts import engine_check_context, sampling_of_yaml
from tests.rollout.server.scripted import SAMPLING, load_from_folder, make_engine, requests, right, said, weights


def how(**changes):
    return sampling_of_yaml(**changes)


def shared(**changes):
    return yaml_options("rollout/engine/servers/_base.yaml", poll_s=0.5, **changes)


def server_api(**engine_args):
    return SGLangApi(engine_args)


def answer(reason=None, **changes):
    """What a real server said to a request, without the fields that nobody reads."""
    said = [[-3.4, 29, None], [-1.5, 25, None]]
    reason = reason or {"type": "length", "length": 2}
    about = {"id": "1", "finish_reason": reason, "weight_version": "7", "output_token_logprobs": said}
    return {"text": "79", "output_ids": [29, 25], "meta_info": about | changes}


def test_a_prompt_with_media_is_sent_with_urls_and_comes_back():
    body = (
        SGLangApi({}, None, (8, 9))
        .request(ServerPrompt([4, 9], {"image": ["data:a", "data:b"]}), 1, 9, [1], how())
        .body
    )
    assert (body["input_ids"], body["image_data"]) == ([4, 9], ["data:a", "data:b"])
    assert body["return_prompt_token_ids"] is True
    assert body["sampling_params"]["logit_bias"] == {8: -1e9, 9: -1e9}
    assert "image_data" not in SGLangApi({}, None, (8, 9)).request(ServerPrompt([4]), 1, 9, [1], how()).body
    assert SGLangApi({}).parse(answer() | {"prompt_token_ids": [4, 9, 9]}).prompt == [4, 9, 9]


def line(server_api, monkeypatch, has_gpu=False):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    command, environment = server_api.command("/venv/bin/python", Path("/run/engine"), 8123)
    return " ".join(command), environment


def test_a_server_of_our_own_starts_with_dummy_weights_and_takes_the_arguments(monkeypatch):
    flags = {"dtype": "float32", "enable_mixed_chunk": True, "enable_metrics": False, "revision": None, "tp_size": 2}
    said, environment = line(server_api(**flags, lora_paths=["a", "b"], json_model_override_args={"x": 1}), monkeypatch)
    assert said.startswith("/venv/bin/python -m rft_sglang --model-path /run/engine --host 127.0.0.1 --port 8")
    assert "--load-format dummy" in said and "--dtype float32 --enable-mixed-chunk --tp-size 2 --lora-paths a b" in said
    assert said.endswith('--json-model-override-args {"x": 1}') and "metrics" not in said and "revision" not in said
    assert environment["HF_HUB_OFFLINE"] == "1" and 0 < int(environment["SGLANG_GRPC_PORT"]) < 8123


@pytest.mark.parametrize(
    ("has_gpu", "engine_args", "on_cpu"), [(False, {}, True), (True, {}, False), (True, {"device": "cpu"}, True)]
)
def test_what_a_server_needs_on_a_cpu_it_is_told_there_alone(monkeypatch, has_gpu, engine_args, on_cpu):
    said, environment = line(server_api(**engine_args), monkeypatch, has_gpu)
    assert ("--device cpu" in said, "--max-total-tokens 16384" in said) == (on_cpu, on_cpu)
    assert ("--attention-backend torch_native" in said, "SGLANG_USE_CPU_ENGINE" in environment) == (on_cpu, on_cpu)
    assert "--max-total-tokens 99" in line(server_api(max_total_tokens=99), monkeypatch)[0]


@pytest.mark.parametrize("name", ["load_format", "model_path", "port", "weight_version", "api_key"])
def test_arguments_of_an_sglang_server_that_the_run_decides_are_refused(name):
    with pytest.raises(ValueError, match=rf"rollout\.engine_args\.{name}: .* take it out"):
        server_api(**{name: "x"})


@pytest.mark.parametrize(
    ("changes", "key", "cure"),
    [
        ({"top_p": 0.9}, "top_p=0.9", "top_p=1.0"),
        ({"top_k": 5}, "top_k=5", "top_k=0"),
        ({"min_p": 0.1}, "min_p=0.1", "min_p=0.0"),
        ({"first_token": FirstToken(30.0, 16)}, "first_token:", "rollout/first_token=none"),
    ],
)
def test_sampling_whose_log_probabilities_sglang_does_not_report_is_refused(changes, key, cure):
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}.*set {re.escape(cure)} or rollout=hf"):
        SGLangServers.check_sampling(how(**changes), logprobs=True)
    for fine in ({}, {"temperature": 0.0}, {"temperature": 30.0, "stop": ["\n"]}):
        SGLangServers.check_sampling(how(**fine), logprobs=True)


def test_samples_whose_log_probabilities_nobody_reads_may_be_truncated():
    for fine in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        SGLangServers.check_sampling(how(**fine), logprobs=False)
    with pytest.raises(ValueError, match=r"^top_p=0\.9 with top_k=5: SGLang takes the mass"):
        SGLangServers.check_sampling(how(top_p=0.9, top_k=5), logprobs=False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout=sglang", "rollout.top_p=0.9"], "rollout.top_p=0.9: SGLang reports"),
        (["rollout=sglang", "eval.samples=2", "eval.top_p=0.9", "eval.top_k=3"], "eval.top_p=0.9 with top_k=3: SGLang"),
        (["rollout=vllm_server", "eval.samples=2", "eval.temperature=2.5"], "eval.temperature=2.5: vLLM samples"),
        (["rollout=sglang", "eval.samples=2", "eval.top_p=0.9"], None),
    ],
)
def test_what_an_engine_cannot_draw_is_refused_by_its_key(overrides, message, resolved):
    if message is None:
        Components(resolved(*overrides))
        return
    with pytest.raises(Problems) as raised:
        Components(resolved(*overrides))
    assert [text[: len(message)] for text in raised.value.messages] == [message]


def test_changed_elements_alone_are_nothing_for_sglang():
    options = SGLangServers.Options(servers=Servers(**shared(transport="group", deltas=True)))
    with pytest.raises(ValueError, match=r"^rollout\.engine\.servers\.deltas=true: SGLang's servers receive whole"):
        options.check(engine_check_context(how()))


def test_handles_of_shared_memory_are_nothing_for_sglang():
    options = SGLangServers.Options(servers=Servers(**shared(transport="ipc")))
    with pytest.raises(ValueError, match=r"^rollout\.engine\.servers\.transport=ipc: SGLang .*; set it to folder"):
        options.check(engine_check_context(how()))


def test_sglang_servers_that_cannot_be_started_here_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"servers\.python: sglang is not installed here.*install_sglang_cpu\.sh"):
        SGLangServers.Options(servers=Servers(**shared())).check_here()
    SGLangServers.Options(servers=Servers(**shared(python=sys.executable))).check_here()


def test_a_request_of_sglang_says_how_every_token_is_drawn_and_ends():
    call = server_api().request(ServerPrompt([4, 29]), 2**63 - 1, 9, [1, 6], how(temperature=0.7, stop=["\n"]))
    assert call.path == "/generate" and call.body == {
        "input_ids": [4, 29],
        "sampling_params": {
            "max_new_tokens": 9, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "sampling_seed": 2**63 - 1, "stop": ["\n"], "stop_token_ids": [1, 6],
        },
        "return_logprob": True,
    }  # fmt: skip


def test_an_answer_of_sglang_is_taken_apart():
    sampled = server_api().parse(answer())
    assert (sampled.tokens, sampled.logprobs) == ([29, 25], [-3.4, -1.5])
    assert (sampled.finish_reason, sampled.versions) == ("length", [7, 7])
    foreign = server_api().parse(answer({"type": "stop", "matched": 25}, weight_version="default"))
    assert foreign.versions == [None, None]


@pytest.mark.parametrize("message", ["Aborted", "Abort in waiting queue"])
def test_a_sample_that_sglang_aborted_is_no_sample(message):
    for held in ({}, {"output_token_logprobs": []}):
        with pytest.raises(Aborted, match=message):
            server_api().parse(answer({"type": "abort", "message": message}, **held))


@pytest.mark.parametrize(
    "changes",
    [
        {"output_token_logprobs": [[-3.4, 29, None]]},
        {"output_token_logprobs": [[-3.4, 29, None], [-1.5, 26, None]]},
        {"output_token_logprobs": [[-3.4, 29, None], [None, 25, None]]},
        {"output_token_logprobs": []},
        {"weight_version": 7},
        {"reason": {"type": "error"}},
    ],
)
def test_an_answer_of_sglang_that_makes_no_sense_is_refused(changes):
    with pytest.raises((ValueError, TypeError, AttributeError)):
        server_api().parse(answer(**changes))


def test_a_server_that_says_it_did_not_load_is_not_believed_to_have_loaded():
    class Unwilling(ServerClient):
        async def get(self, path):
            return {"weight_version": "default"}

        async def post(self, path, body=None):
            return {"success": False, "message": "no room"}

    with pytest.raises(BadResponse, match=r"server 0 .* did not load the weights of /w/v3: no room"):
        asyncio.run(
            load_from_folder(server_api(), Unwilling.at(0, "127.0.0.1:1"), WeightVersion(3, Path("/w/v3"), {}, None))
        )


def test_a_server_that_computes_in_another_type_is_given_no_rounded_weights():
    class Wide(ServerClient):
        async def get(self, path):
            return {"dtype": "auto"}

    with pytest.raises(BadResponse, match=r"computes in auto, .*: start it with --dtype bfloat16, or set .*dtype=null"):
        asyncio.run(
            load_from_folder(server_api(), Wide.at(0, "127.0.0.1:1"), WeightVersion(3, Path("/w"), {}, torch.bfloat16))
        )


def test_servers_are_told_whole_paths(fakes, tmp_path, monkeypatch):
    """A relative one would be looked for where the server stands, or on the hub."""
    monkeypatch.chdir(tmp_path)
    made = make_engine(start("cpu"), SGLangApi({}), Path("run"), fakes(1))
    try:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        made.update_weights(1, weights(1).items())
        assert said(made.generate(requests(), SAMPLING)) == right(requests(), 1)
        assert (tmp_path / "run" / "weights" / "v1").is_dir()
    finally:
        made.close()
