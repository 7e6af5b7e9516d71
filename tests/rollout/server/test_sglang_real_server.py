"""A real SGLang server: sampling, new weights, its key, and its death.

It runs in the environment of the interpreter that RFT_SGLANG_PYTHON names, or of this one.
"""

import asyncio
import os
import signal
import threading

import pytest
import torch

from rft.data.encode.tokenizer import characters
from rft.distributed import start
from rft.remote.http_client import RequestFailed, RequestRefused
from rft.rollout.engine.base import Request
from rft.rollout.server.options import Servers
from rft.rollout.server.remote.rft_receiver import TOKEN_GROUP
from rft.rollout.server.sglang import SGLangServers
from rft.rollout.server.weights.version import WeightVersion
from tests.conftest import SOON_S
from tests.helpers import engine_context
from tests.rollout.server.real_servers import (
    TOKEN,
    gone,
    interpreter,
    judges,
    key_of,
    leaks,
    processes_of,
    shared_memory,
    until,
)
from tests.rollout.server.scripted import Announced, load_from_folder, tied_model
from tests.rollout.server.teacher_runs import check_columns, check_runs
from tests.rollout.server.ten_turns import gap_of_ten_turns
from tests.rollout.server.test_sglang import how, shared

VOCABULARY = 30
PROMPT = [3, 8, 9, 12, 20, 4]


@pytest.fixture(scope="module")
def model():
    return tied_model(VOCABULARY)


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    """A real server, which serves version 1: the model as it is."""
    python = interpreter("sglang") or pytest.skip("RFT_SGLANG_PYTHON names no interpreter, and this one has no sglang")
    folder, tokenizer = tmp_path_factory.mktemp("run"), characters(alphabet="0123456789abcdefghijklmnop ")
    tokenizer.chat_template = "{{ messages[-1].content }}"
    options = SGLangServers.Options(servers=Servers(**shared(python=python)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        made = SGLangServers(options, engine_context(model, tokenizer, folder, start("cpu"), dtype="float32"))
        try:
            made.update_weights(1, model.state_dict().items())
            patch.setenv(TOKEN, key_of(made))
            yield made
            own = processes_of(made._servers[0].client.port)
            held = shared_memory(own)
        finally:
            made.close()
    assert len(own) > 2
    until(lambda: gone(own), SOON_S)
    assert held and not [file for file in held if file.exists()]


def gap(model, requests, found, temperature=1.0):
    """The largest difference between the log-probabilities of the server and of the model."""
    differences = []
    for request, group in zip(requests, found, strict=True):
        for row in group:
            logits = model(torch.tensor([request.prompt + row.tokens])).logits[0, len(request.prompt) - 1 : -1]
            said = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])[:, 0]  # (L,)
            differences.append((said - torch.tensor(row.logprobs)).abs().max().item())
    return max(differences)


def disturb(model):
    for weight in model.parameters():
        weight += 0.05 * torch.randn_like(weight)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_a_real_server_tells_the_log_probabilities_of_the_distribution_that_it_draws_from(engine, model, temperature):
    requests = [Request(PROMPT, list(range(24))), Request([7], [2**63 - 1])]
    found = engine.generate(requests, how(temperature=temperature))
    assert gap(model, requests, found, temperature) < 1e-5
    assert len({tuple(row.tokens) for row in found[0]}) > 12, "samples of a group differ"


@pytest.mark.slow
def test_greedy_tokens_of_a_real_server_are_the_most_likely_and_carry_plain_log_probabilities(engine, model):
    requests = [Request(PROMPT, [1]), Request([7, 9], [2])]
    found = engine.generate(requests, how(temperature=0.0))
    assert gap(model, requests, found) < 1e-5
    for request, [row] in zip(requests, found, strict=True):
        best = model(torch.tensor([request.prompt + row.tokens])).logits[0, len(request.prompt) - 1 : -1]
        assert best.argmax(-1).tolist() == row.tokens


@pytest.mark.slow
def test_dialogues_of_ten_turns_have_the_log_probabilities_of_the_model(engine, model):
    assert gap_of_ten_turns(engine, model, how(max_new_tokens=22)) < 1e-5


@pytest.mark.slow
def test_a_real_server_is_a_teacher(engine, model, tiny, tmp_path):
    model.save_pretrained(tmp_path / "teacher")
    engine.context.tokenizer.save_pretrained(tmp_path / "teacher")
    addresses = [f"{server.client.host}:{server.client.port}" for server in engine._servers]
    check_columns(addresses, tmp_path / "teacher", engine.context.tokenizer)
    run = ("algorithm=on_policy_distill", "algorithm/terms=[reverse_kl]", "warmup=none", "steps=1")
    check_runs(addresses, tmp_path / "teacher", tiny, tmp_path, run)


@pytest.mark.slow
def test_a_sample_of_a_real_server_ends_at_its_end(engine, monkeypatch):
    [group] = engine.generate([Request(PROMPT, list(range(200)))], how())
    assert {row.tokens[-1] for row in group if row.finish_reason == "stop"} == {1, 5, 6}, "of tokenizer and model"
    for row in group:
        assert not {1, 5, 6} & set(row.tokens[:-1])
        assert row.finish_reason == "stop" or len(row.tokens) == 24
        assert row.versions == [1] * len(row.tokens)
    monkeypatch.setattr(engine, "_ends", [1, 5, 6, 9])  # one more than the server knows of
    [group] = engine.generate([Request(PROMPT, list(range(60)))], how())
    assert any(row.tokens[-1] == 9 for row in group) and not any(9 in row.tokens[:-1] for row in group)
    [group] = engine.generate([Request(PROMPT, [3, 4, 5], limits=[1, 2, 300])], how())
    assert [len(row.tokens) <= most for row, most in zip(group, (1, 2, 24), strict=True)] == [True] * 3
    [group] = engine.generate([Request(PROMPT, list(range(60)))], how(stop=["7", "cd"]))
    seven = engine.context.tokenizer.convert_tokens_to_ids("7")
    assert all("7" not in row.text and "cd" not in row.text and seven not in row.tokens[:-1] for row in group)
    assert sum(row.finish_reason == "stop" and row.tokens[-1] == seven for row in group) > 5


@pytest.mark.slow
def test_a_real_server_hides_its_key_and_answers_its_health_alone_without_it(engine):
    assert leaks(engine) == {"/health", "/health_generate"}


@pytest.mark.slow
def test_a_real_server_is_a_judge(engine, model):
    assert judges(engine, model)


@pytest.mark.slow
def test_a_real_server_serves_new_weights_and_forgets_old_prefixes(engine, model, monkeypatch):
    requests = [Request([3 + number * 7 % 26 for number in range(180)], [1, 2, 3]), Request(PROMPT, [4, 5, 6])]
    for version, transport in enumerate(("folder", "group", "group"), 2):
        monkeypatch.setitem(vars(engine.options.servers), "transport", transport)
        if version < 4:
            engine._pool._monitors[0].close_transport()
        assert gap(model, requests, engine.generate(requests, how())) < 1e-4
        disturb(model)
        assert gap(model, requests, engine.generate(requests, how())) > 1e-2, "these weights are another model"
        monkeypatch.setitem(vars(engine.options.servers), "sleep", version < 4)
        engine.sleep()
        assert (engine._loop.run(engine._server_api.version(engine._servers[0].client)) is None) == (version < 4)
        engine.update_weights(version, model.state_dict().items())
        found = engine.generate(requests, how())
        assert gap(model, requests, found) < 1e-4
        assert {number for group in found for row in group for number in row.versions} == {version}


@pytest.mark.slow
def test_a_folder_without_weights_leaves_a_real_server_as_it_was(engine, model, tmp_path):
    empty = WeightVersion(99, tmp_path, {}, None)
    with pytest.raises(RequestRefused, match="Cannot find any model weights"):
        asyncio.run(load_from_folder(engine._server_api, engine._servers[0].client, empty))
    requests = [Request([number], [number]) for number in range(7, 19)]
    assert gap(model, requests, engine.generate(requests, how())) < 1e-4
    assert engine.health()["retries"] == 0


@pytest.mark.slow
def test_samples_that_a_load_ends_are_asked_for_again(engine, model):
    """Repeats loads until one has ended samples: all samples may end before a load reaches the server."""
    requests = [Request([number], list(range(8))) for number in range(7, 30)]
    peer, weights = engine._servers[0].client, engine._pool._committed
    engine.health()

    def load(sampled):
        while not (engine._counts["retries"] or sampled.is_set()):
            asyncio.run(load_from_folder(engine._server_api, peer, weights))

    def sample():
        sampled, done = threading.Event(), []
        loading = threading.Thread(target=load, args=[sampled])

        def on_completion(request, sample, completion):
            done.append(completion)
            if len(done) > 20 and loading.ident is None:
                loading.start()

        found = engine.generate(requests, how(max_new_tokens=200), on_completion)
        sampled.set()
        loading.join()
        assert [len(group) for group in found] == [8] * 23 and gap(model, requests, found) < 1e-4

    for _ in range(10):
        sample()
        if engine._counts["retries"]:
            break
    assert engine.health()["retries"] > 0


@pytest.mark.slow
def test_a_real_server_that_is_killed_is_started_anew_with_the_current_weights(engine, model, monkeypatch):
    monkeypatch.setitem(vars(engine.options.servers), "transport", "group")
    requests = [Request([number % 23 + 7, number], list(range(8))) for number in range(29)]
    before = processes_of(engine._servers[0].client.port)

    def kill():
        for number in before[1:]:
            os.kill(number, signal.SIGKILL)

    found = engine.generate(requests, how(max_new_tokens=100), heard := Announced(60, kill))
    assert heard.all_once(29, 8) and [len(group) for group in found] == [8] * 29
    assert gap(model, requests, found) < 1e-4
    assert engine.health()["retries"] > 0


@pytest.mark.slow
def test_a_real_server_joins_no_group_of_another_token(engine, monkeypatch):
    client = engine._servers[0].client
    monkeypatch.setitem(vars(engine.options.servers), "transport", "group")

    def join():
        transport = engine._loop.run(engine._server_api.transport(client, engine.options.servers, torch.device("cpu")))
        engine._loop.run(transport.open())
        return transport

    assert join().rendezvous.name.startswith(TOKEN_GROUP)
    monkeypatch.setattr(client, "key", "another")
    with pytest.raises((RequestFailed, RequestRefused), match=r"member [01] of the process group has another token"):
        join()
