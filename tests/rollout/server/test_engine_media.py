"""Real servers sample from prompts with media. They run in the environments that RFT_VLLM_PYTHON and RFT_SGLANG_PYTHON
name, or in this one."""

from dataclasses import replace

import pytest

from rft.distributed import start
from rft.rollout.engine.base import Request
from rft.rollout.engine.expanded import OtherPrompt
from rft.rollout.engine.sampling import Sampling
from rft.rollout.server.options import Servers
from rft.rollout.server.sglang import SGLangServers
from rft.rollout.server.vllm import VLLMServers
from tests import families
from tests.families.rows import encoder
from tests.helpers import engine_context, yaml_options
from tests.rollout.media import check_samples_with_media, family_for_vllm, off_with_media
from tests.rollout.server.real_servers import QUIET, interpreter

KINDS = {
    "vllm": (VLLMServers, {"merge_lora": True}, {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}),
    "sglang": (SGLangServers, {}, {"dtype": "float32"}),
}
# SGLang reads patches of other sizes as embeddings. Images of whole patches are not scaled, which it does otherwise.
PATCHES = {"patch_size": 14, "size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}}


def asked(*parts):
    return {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "how many?"}]}]}


def medium(family, number):
    if "image" in family.kinds:
        return {"type": "image", "image": families.picture(number, 28 * (1 + number % 2), 28)}
    return {"type": "audio", "audio": {"array": families.sound(number, 3200 + 800 * number), "sampling_rate": 16000}}


CASES = [("vllm", "qwen2_5_vl"), ("vllm", "qwen2_audio"), ("sglang", "qwen2_5_vl")]


@pytest.fixture(params=CASES, ids="-".join)
def served(request, monkeypatch, tmp_path):
    """A tiny model, its encoder, and an engine with a server."""
    package, family = request.param
    python = interpreter(package) or pytest.skip(f"no interpreter has {package}")
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    for name, value in PATCHES.items():
        monkeypatch.setitem(families.PATCHES, name, value)
    one, (kind, options, arguments) = family_for_vllm(family, monkeypatch), KINDS[package]
    encode = encoder(one)
    encode.processor.keeps_raw = kind.facts.has_processor
    context = engine_context(one.model(), encode.processor.tokenizer, tmp_path, start("cpu"), **arguments)
    servers = Servers(**yaml_options("rollout/engine/servers/_base.yaml", count=1, python=python, poll_s=0.5))
    engine = kind(kind.Options(servers=servers, **options), replace(context, media=encode.media_facts))
    yield one, encode, engine
    engine.close()


@pytest.mark.slow
@pytest.mark.suite
def test_servers_sample_from_prompts_with_media_as_transformers_computes_them(served):
    one, encode, engine = served
    how = Sampling(8, 1.0, 1.0, 0, 0.0, [], None)
    quote = one.processor.tokenizer.convert_ids_to_tokens(one.placeholders[one.kinds[0]])
    first, *two = (medium(one, number) for number in range(3))
    given = [asked(first), {"prompt": "hello"}, asked(*two), {"prompt": f"a {quote}"}]
    requests = [Request(prompt, [11, 12]) for prompt in encode.prompts(given)]
    check_samples_with_media(one, encode, engine, requests, how, (1, 2))
    [quoted] = encode.prompts([asked(first, {"type": "text", "text": quote})])
    if isinstance(engine, SGLangServers):  # it decodes a prompt with media, and encodes the text again
        with pytest.raises(OtherPrompt, match=r"prompt 0: .*behind .*rollout=hf"):
            engine.generate([Request(quoted, [1])], how)
    else:
        [[answer]] = engine.generate([Request(quoted, [1])], how)
        assert off_with_media(one.model(2), encode.media_facts, Request(quoted, [1]), answer) < 1e-5
