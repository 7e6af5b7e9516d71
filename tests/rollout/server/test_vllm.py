"""What a vLLM server is told and what it says; test_vllm_server_real.py runs real ones."""

import asyncio
import json
import os
import re
import shlex
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rft
from rft.remote.http_client import BadResponse, RequestRefused, ServerClient
from rft.rollout.engine.sampling import FirstToken
from rft.rollout.engine.vllm_checks import unloaded
from rft.rollout.server.options import Servers
from rft.rollout.server.server_api import ServerPrompt
from rft.rollout.server.vllm import VLLMApi, VLLMServers
from rft.rollout.server.weights.version import Adapter, WeightVersion
from tests.helpers import yaml_options
from tests.rollout.contexts import engine_check_context, sampling_of_yaml
from tests.rollout.media import MEDIA
from tests.rollout.server.scripted import load_from_folder

PAGE = Path(rft.__file__).parent.parent / "docs" / "engines.md"
INFO = "/server_info?config_format=json"
WEIGHTS = WeightVersion(3, Path("/weights/v3"), {}, None)


def how(**changes):
    return sampling_of_yaml(**{"max_new_tokens": 16} | changes)


def answer(**changes):
    """What a server says to a request, without the fields that nobody reads."""
    said = {"top_logprobs": [], "rank": 3}
    choice = {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [29, 25],
        "weight_versions": [{"version": "7", "start": 0, "end": 2}],
        "logprobs": {"content": [{"token_id": 29, "logprob": -3.4, **said}, {"token_id": 25, "logprob": -1.5, **said}]},
    }
    return {"request_id": "generate-tokens-1", "choices": [choice | changes]}


def test_a_server_of_our_own_starts_with_dummy_weights_and_takes_the_arguments():
    command, environment = VLLMApi({"dtype": "float32", "seed": 3}).command(
        "/venv/bin/python", Path("/run/engine"), 8123
    )
    line = " ".join(command)
    assert command[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    for part in (
        "--model /run/engine",
        "--port 8123",
        "--host 127.0.0.1",
        "--load-format dummy",
        "--dtype float32 --seed 3",
    ):
        assert part in line
    assert "--logprobs-mode processed_logprobs" in line and "--enable-scale-out --" in line
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["HF_HUB_OFFLINE"] == "1"
    assert "--worker-extension-cls rft_receiver.Receiver" in line
    assert Path(environment["PYTHONPATH"].split(os.pathsep)[0], "rft_receiver.py").is_file()


def test_arguments_become_flags():
    arguments = {
        "enforce_eager": False,
        "quantization": None,
        "tensor_parallel_size": 2,
        "lora_modules": ["a.b", "c.d"],
    }
    arguments["hf_overrides"] = {"rope_theta": 1e6}
    command, _ = VLLMApi(arguments).command("python", Path("m"), 1)
    line = " ".join(command)
    assert "--no-enforce-eager --tensor-parallel-size 2 --lora-modules a.b c.d" in line
    assert "quantization" not in line
    assert json.loads(command[command.index("--hf-overrides") + 1]) == {"rope_theta": 1e6}


def test_the_page_on_engines_starts_a_server_as_the_run_does():
    [shown] = re.findall(r"```bash\n(VLLM_SERVER_DEV_MODE.*?)```", PAGE.read_text().replace("\\\n", ""), re.DOTALL)
    (switch, *shown), ours = shlex.split(shown), VLLMApi({}).command("python", Path("/data/model"), 8000)
    assert switch == "VLLM_SERVER_DEV_MODE=1" and ours[1]["VLLM_SERVER_DEV_MODE"] == "1"
    assert set(shown) < set(ours[0]) and {"--logprobs-mode", "--enable-scale-out"} < set(shown)


@pytest.mark.parametrize("name", ["load_format", "logprobs_mode", "port", "enable_scale_out", "api_key", "middleware"])
def test_arguments_that_the_run_decides_are_refused(name):
    with pytest.raises(ValueError, match=rf"rollout\.engine_args\.{name}: .* take it out"):
        VLLMApi({name: "x"})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"temperature": 0.001}, "temperature=0.001"),
        ({"temperature": 2.5}, "temperature=2.5"),
        ({"min_p": 0.1, "top_p": 0.9}, "min_p=0.1 with top_p=0.9"),
        ({"first_token": FirstToken(temperature=5.0, top_k=3)}, "first_token"),
    ],
)
def test_sampling_that_vllm_does_otherwise_is_refused(changes, key):
    with pytest.raises(ValueError, match=f"^{re.escape(key)}"):
        VLLMServers.check_sampling(how(**changes), logprobs=False)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"min_p": 0.1, "top_k": 4}, {"top_p": 0.9, "top_k": 4}])
def test_sampling_that_vllm_does_as_asked_passes(changes):
    VLLMServers.check_sampling(how(**changes), logprobs=True)


def options_of(**changes):
    servers = Servers(**yaml_options("rollout/engine/servers/_base.yaml", **changes))
    return VLLMServers.Options(servers=servers, merge_lora=True)


def check(engine_args, servers):
    options_of(**servers).check(engine_check_context(how(), engine_args=engine_args))


def test_weights_are_rounded_to_the_type_that_servers_compute_in_alone():
    check({"dtype": "bfloat16"}, {"dtype": "bfloat16"})
    check({}, {"dtype": "bfloat16", "count": 0, "addresses": ["10.0.0.7:8000"]})
    with pytest.raises(ValueError, match=r"servers\.dtype=float16: .*rollout\.engine_args\.dtype=bfloat16; set both"):
        check({"dtype": "bfloat16"}, {"dtype": "float16"})


def check_here(**servers):
    options_of(**servers).check_here()


def test_servers_are_started_only_where_vllm_can_be(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"servers\.python: vllm is not .* scripts/install_vllm_cpu\.sh"):
        check_here(count=1)
    with pytest.raises(ValueError, match=r"rollout\.engine\.servers\.python=/no/where: there is no such program"):
        check_here(count=1, python="/no/where")
    check_here(count=1, python=sys.executable)
    check_here(count=0, addresses=["10.0.0.7:8000"])


def test_only_servers_of_this_machine_share_its_memory(monkeypatch):
    check_here(count=0, addresses=["127.0.0.1:8000", "localhost:8001"], transport="ipc")
    distant = {"count": 0, "addresses": ["127.0.0.1:8000", "192.0.2.1:8000"]}
    check_here(**distant, transport="group")
    with pytest.raises(ValueError, match=r"transport=ipc: 192\.0\.2\.1:8000 is not .* set .*transport=group"):
        check_here(**distant, transport="ipc")
    monkeypatch.setenv("RANK", "1")  # it shares no memory, and its machine may be another one
    check_here(**distant, transport="ipc")


def test_a_request_says_how_every_token_is_drawn_and_ends():
    call = VLLMApi({}).request(
        ServerPrompt([4, 5]), 2**63 - 1, 9, [1, 6], how(temperature=0.7, top_k=3, top_p=0.9, stop=["\n"])
    )
    assert call.body["token_ids"] == [4, 5]
    assert call.body["sampling_params"] == {
        "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_p": 0.0, "seed": 2**63 - 1,
        "stop": ["\n"], "stop_token_ids": [1, 6], "logprobs": 0, "detokenize": True,
    }  # fmt: skip


def test_a_prompt_with_media_is_sent_with_urls_and_comes_back():
    prompt = ServerPrompt([4, 9, 5], {"image": ["data:a", "data:b"], "audio": ["data:c"]})
    body = VLLMApi({}, MEDIA, (8, 9)).request(prompt, 1, 9, [1], how()).body
    assert (body["token_ids"], body["return_token_ids"]) == ([4, 9, 5], True)
    assert body["content_parts"] == [
        {"type": "image_url", "url": "data:a"}, {"type": "image_url", "url": "data:b"},
        {"type": "audio_url", "url": "data:c"},
    ]  # fmt: skip
    assert body["sampling_params"]["logit_bias"] == {8: -1e9, 9: -1e9}
    text = VLLMApi({}, MEDIA, (8, 9)).request(ServerPrompt([4]), 1, 9, [1], how()).body
    assert "content_parts" not in text and text["sampling_params"]["logit_bias"] == {8: -1e9, 9: -1e9}
    assert VLLMApi({}).parse(answer() | {"prompt_token_ids": [4, 9, 9, 5]}).prompt == [4, 9, 9, 5]


def test_an_answer_is_taken_apart():
    sampled = VLLMApi({}).parse(answer())
    assert (sampled.tokens, sampled.logprobs) == ([29, 25], [-3.4, -1.5])
    assert (sampled.finish_reason, sampled.versions) == ("length", [7, 7])
    foreign = VLLMApi({}).parse(answer(weight_versions=[{"version": "default", "start": 0, "end": 2}]))
    assert foreign.versions == [None, None]
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    assert VLLMApi({}).parse(answer(weight_versions=spans)).versions == [7, 8]


@pytest.mark.parametrize("empty", [{}, {"token_ids": [], "weight_versions": [], "logprobs": {"content": []}}])
def test_a_sample_that_was_aborted_has_the_tokens_before_that(empty):
    sampled = VLLMApi({}).parse(answer(finish_reason="abort", **empty))
    assert sampled.finish_reason == "abort"
    assert sampled.tokens == ([] if empty else [29, 25]) and sampled.versions == ([] if empty else [7, 7])


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [29, 26]},
        {"token_ids": [29]},
        {"logprobs": None},
        {"weight_versions": None},
        {"weight_versions": [{"version": "7", "start": 0, "end": 1}]},
        {"weight_versions": [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "7", "start": 0, "end": 2**31}]},  # as a list it does not fit in memory
        {"weight_versions": [{"version": "7", "start": 0, "end": -1}, {"version": "7", "start": 0, "end": 2}]},
        {"finish_reason": "error"},
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(changes):
    with pytest.raises((ValueError, TypeError, KeyError)):
        VLLMApi({}).parse(answer(**changes))


def told(lora=None, speculative=None, extension="", **changes):
    """What a server says of itself."""
    model = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"}
    config = {"model_config": model | changes, "lora_config": lora, "speculative_config": speculative}
    workers = {
        "parallel_config": {"worker_extension_cls": extension},
        "device_config": {"device": "cpu"},
        "scheduler_config": {"enable_chunked_prefill": False},
    }
    return {"vllm_config": config | workers}


class Scripted(ServerClient):
    """Answers as a server would, and keeps what it was told."""

    def __init__(self, **answers):
        super().__init__("server 0 (127.0.0.1:1)", "http://127.0.0.1:1")
        self.told = []
        self.answers = {
            INFO: told(),
            "/reset_prefix_cache": {"success": True},
            "/weight_info": {"weight_version": "default"},
            "/collective_rpc": {"results": [None]},
            "/inference/v1/generate": None,
            **answers,
        }

    async def get(self, path):
        if path not in self.answers:
            raise RequestRefused(f"{self.name}: GET {path}: status 404", 404)
        return self.answers[path]

    async def post(self, path, body=None):
        await self.post_raw(path, body)
        return self.answers.get(path, {})

    async def post_raw(self, path, body=None):
        self.told.append((body or {}).get("method", path))


def test_a_server_whose_log_probabilities_are_of_another_kind_is_given_no_weights():
    peer = Scripted(**{INFO: told(logprobs_mode="raw_logprobs")})
    with pytest.raises(BadResponse, match=r"start it with --logprobs-mode processed_logprobs, not raw_logprobs"):
        asyncio.run(load_from_folder(VLLMApi({}), peer, WEIGHTS))
    assert not peer.told


def test_a_server_whose_dummy_weights_scale_media_is_given_no_weights():
    for load_format, raised in (("dummy", True), ("auto", False)):
        said = told(multimodal_config={"mm_device_do_normalize": True})
        said["vllm_config"]["load_config"] = {"load_format": load_format}
        peer = Scripted(**{INFO: said})
        with pytest.raises(BadResponse, match="--no-mm-device-do-normalize") if raised else nullcontext():
            asyncio.run(load_from_folder(VLLMApi({}, MEDIA), peer, WEIGHTS))
        assert bool(peer.told) != raised
        asyncio.run(load_from_folder(VLLMApi({}), Scripted(**{INFO: said}), WEIGHTS))


def test_a_server_whose_media_cannot_attend_to_later_tokens_is_given_no_weights():
    for extension, device, attends, raised in (
        ("rft_receiver.Receiver", "cpu", ["A"], True), ("rft_receiver.Receiver", "cpu", [], False),
        ("rft_receiver.Receiver", "cuda", ["A"], False), ("", "cpu", ["A"], False),
    ):  # fmt: skip
        said = told(extension=extension, multimodal_config={"mm_device_do_normalize": False})
        said["vllm_config"] |= {"device_config": {"device": device}, "load_config": {"load_format": "dummy"}}
        peer = Scripted(**{INFO: said, "/collective_rpc": {"results": [attends]}})
        with pytest.raises(BadResponse, match=r"in A each .*set rollout=hf") if raised else suppress(BadResponse):
            asyncio.run(load_from_folder(VLLMApi({}, MEDIA), peer, WEIGHTS))
        assert ("/pause?mode=abort" in peer.told) != raised


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False)])
def test_a_server_on_a_cpu_that_computes_parts_of_prompts_is_given_no_weights(device, refused):
    said = told()
    said["vllm_config"] |= {"device_config": {"device": device}, "scheduler_config": {"enable_chunked_prefill": True}}
    peer = Scripted(**{INFO: said})
    with (
        pytest.raises(BadResponse, match=r"dies .*start it with --no-enable-chunked")
        if refused
        else suppress(BadResponse)
    ):
        asyncio.run(load_from_folder(VLLMApi({}), peer, WEIGHTS))
    assert ("/pause?mode=abort" in peer.told) != refused


def test_a_server_that_speculates_is_given_no_weights():
    peer = Scripted(**{INFO: told(speculative={"method": "ngram"})})
    with pytest.raises(BadResponse, match=r"with speculative decoding .*: start it without"):
        asyncio.run(load_from_folder(VLLMApi({}), peer, WEIGHTS))
    assert not peer.told
    with pytest.raises(ValueError, match=r"^rollout\.engine_args\.speculative_config: .*take it out"):
        VLLMApi({"speculative_config": {"method": "ngram"}})


def test_a_server_of_another_type_or_without_adapters_is_given_none(tmp_path):
    rounded = replace(WEIGHTS, dtype=torch.bfloat16)
    with pytest.raises(
        BadResponse, match=r"computes in float32, .* rounded to bfloat16: start it with --dtype bfloat16"
    ):
        asyncio.run(load_from_folder(VLLMApi({}), peer := Scripted(), rounded))
    adapted = replace(WEIGHTS, adapter=Adapter(tmp_path / "rft-1", {}))
    with pytest.raises(BadResponse, match=r"does not accept adapters: start it with .*--enable-lora.*merge_lora=true"):
        asyncio.run(load_from_folder(VLLMApi({}), peer, adapted))
    assert not peer.told


def test_a_server_that_keeps_old_prefixes_is_neither_stamped_nor_resumed():
    peer = Scripted(**{"/reset_prefix_cache": {"success": False}})
    with pytest.raises(BadResponse, match="prefixes"):
        asyncio.run(load_from_folder(VLLMApi({}), peer, WEIGHTS))
    assert peer.told == ["/pause?mode=abort", "update_config", "reload_weights", "/reset_prefix_cache"]


def test_workers_of_a_run_tell_which_weights_did_not_come():
    missing = {"/collective_rpc": {"results": [[], ["model.norm.weight"]]}}
    peer = Scripted(**{INFO: told(extension="rft_receiver.Receiver")}, **missing)
    with pytest.raises(BadResponse, match=r"vLLM's model has weights .*: model\.norm\.weight\. .*rollout=hf"):
        asyncio.run(load_from_folder(VLLMApi({}), peer, WEIGHTS))
    assert peer.told == ["/pause?mode=abort", "update_config", "rft_load"]
    assert ": a, b, c, d, e and 2 more. " in unloaded([*"abcdefg"])


def test_a_server_that_would_leave_experts_unpacked_is_given_none():
    experts = replace(WEIGHTS, tensors={"model.layers.0.mlp.experts.down_proj": None})
    with pytest.raises(BadResponse, match=r"on a CPU vLLM alone samples from wrong experts .*--worker-extension-cls"):
        asyncio.run(load_from_folder(VLLMApi({}), peer := Scripted(), experts))
    assert peer.told == ["/pause?mode=abort"]
    peer = Scripted(**{INFO: told(extension="rft_receiver.Receiver")})
    asyncio.run(load_from_folder(VLLMApi({}), peer, experts))
    assert "rft_load" in peer.told


def test_a_server_without_the_endpoint_for_samples_is_given_no_weights():
    peer = Scripted()
    del peer.answers["/inference/v1/generate"]
    with pytest.raises(RequestRefused, match="status 404") as caught:
        asyncio.run(load_from_folder(VLLMApi({}), peer, WEIGHTS))
    assert caught.value.missing and not peer.told
