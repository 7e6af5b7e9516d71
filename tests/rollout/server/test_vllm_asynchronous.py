"""Real vLLM servers whose weights change while they sample: every token has the log-probability of its label.

RFT_UPDATES=200 makes 200 updates.
"""

import copy
import functools
import os
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch

from rft.data.encode.tokenizer import characters
from rft.distributed import start
from rft.rollout.engine.base import Request
from rft.rollout.server.options import Servers
from rft.rollout.server.vllm import VLLMServers
from tests.conftest import ENDS_S
from tests.helpers import engine_context, yaml_options
from tests.rollout.contexts import sampling_of_yaml
from tests.rollout.server.real_servers import QUIET, counted, interpreter, until
from tests.rollout.server.scripted import tied_model

ARGUMENTS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
TOKENS = "vllm:generation_tokens_total"
LONG = sampling_of_yaml(max_new_tokens=200)


@pytest.fixture(params=["recompute", "abort"])
def engine(request, tmp_path):
    """One real server."""
    python = interpreter("vllm") or pytest.skip("RFT_VLLM_PYTHON names no interpreter, and this one has no vllm")
    options = yaml_options("rollout/engine/servers/_base.yaml", count=1, python=python, poll_s=0.5)
    tokenizer = characters(alphabet="0123456789abcdefghijklmnop ")
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        context = engine_context(tied_model(30), tokenizer, tmp_path, start("cpu"), **ARGUMENTS)
        context = replace(context, while_updating=request.param)
        made = VLLMServers(VLLMServers.Options(servers=Servers(**options), merge_lora=True), context)
        try:
            yield made
        finally:
            made.close()


@functools.cache
def weights_of(model, version):
    """The weights of a version: those of the model with noise, without which equal tokens would hide old keys."""
    drawn = torch.Generator().manual_seed(version)
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += 0.05 * parameter.std().nan_to_num() * torch.randn(parameter.shape, generator=drawn)
    return noisy


@torch.no_grad()
def gaps(model, prompt, row):
    """The differences between the log-probabilities of a sample and those of the weights of its labels, by place."""
    found = []
    for version in sorted(set(row.versions)):
        logits = weights_of(model, version)(torch.tensor([prompt + row.tokens])).logits[0, len(prompt) - 1 : -1]
        known = logits.log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])[:, 0]
        labelled = [place for place, one in enumerate(row.versions) if one == version]
        found += (known[labelled] - torch.tensor(row.logprobs)[labelled]).abs().tolist()
    return found


@pytest.mark.slow
def test_every_token_of_a_real_server_has_the_weights_of_its_label(engine):
    model, updates = tied_model(30), int(os.environ.get("RFT_UPDATES", "8"))
    engine.update_weights(1, weights_of(model, 1).state_dict().items())
    server, found, errors, ended = engine._servers[0].client, [], [], threading.Event()

    def sample(number):
        try:
            while not ended.is_set():
                asked = Request([3 + number, 8, 9], [number, 1000 + number], order=number)
                [group] = engine.generate([asked], LONG)
                found.extend((asked.prompt, row) for row in group)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=sample, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for version in range(2, 2 + updates):
        engine.update_weights(version, weights_of(model, version).state_dict().items())
        sampled = counted(server, TOKENS)
        until(lambda enough=sampled + 40: counted(server, TOKENS) >= enough or errors, ENDS_S)  # some of each sample
    ended.set()
    for thread in threads:
        thread.join(ENDS_S)
    assert not errors and engine.health()["retries"] == 0
    spans = Counter(len(set(row.versions)) for _, row in found)
    assert sum(spans[count] for count in spans if count > 1) >= updates / 2, "samples of several versions"
    apart = [gap for prompt, row in found for gap in gaps(model, prompt, row)]
    assert len(apart) > 20 * updates and max(apart) < 1e-4
