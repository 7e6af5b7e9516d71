"""Adapters that vLLM applies itself: the real engine, where it is installed, against the policy that trains."""

import sys
import typing
from collections import Counter

import pytest
import torch

from rft.actor.lora.base import Lora, LoraWeights
from rft.distributed import start
from rft.errors import Problems
from rft.rollout.engine.base import Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.engine.vllm import VLLMEngine
from rft.rollout.engine.vllm_lora import RANKS, room
from rft.setup.components import Components
from tests.actor.lora.adapters import make
from tests.actor.lora.lora_on_ranks import lora_options
from tests.helpers import MODEL, engine_context, make_batch
from tests.rollout.engine.test_vllm import needs_vllm, run

PLAIN = Sampling(8, 1.0, 1.0, 0, 0.0, [], None)
SHAPE = MODEL | {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "max_position_embeddings": 512}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64}
REQUESTS = [Request([*range(3, 19)] * 18, [1, 2]), Request([5, 6, 7], [3])]  # 288 tokens: more than a block of a cache


def start_engine(actor, folder):
    arguments = {"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.1}
    lora = Lora(**lora_options(rank=4))
    context = engine_context(actor.plain_model(), actor.tokenizer, folder, start("cpu"), lora, **arguments)
    return VLLMEngine(VLLMEngine.Options(sleep_level=None, merge_lora=False), context)


def policy(seed=0, **lora):
    """An actor whose adapters change its model by much."""
    actor = make(start("cpu"), {"rank": 4, "alpha": 5, **lora}, seed=seed, model_config=SHAPE)
    redraw(actor, seed)
    return actor


def redraw(actor, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in actor.strategy.full_tensors(actor.adapters.tensors()):
            tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    built = start_engine(policy(), tmp_path_factory.mktemp("run"))
    yield built
    built.close()


@pytest.fixture
def walks(monkeypatch):
    """How often base, adapters and merged weights were walked through."""
    counts = Counter()

    def count(name):
        walk = vars(LoraWeights)[name]
        monkeypatch.setattr(LoraWeights, name, lambda weights: counts.update([name]) or walk(weights))

    for name in ("base", "alone", "__iter__"):
        count(name)
    return counts


def off(actor, found):
    """The largest difference of the log-probabilities from those of the policy, whose adapters are not merged."""
    worst = 0.0
    for request, group in zip(REQUESTS, found, strict=True):
        for answer in group:
            ids = torch.tensor([request.prompt + answer.tokens])
            rows = make_batch()[:1].select("unit", "group")
            rows["tokens"] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            rows["response_mask"] = rows["loss_mask"] = torch.arange(ids.shape[1])[None] >= len(request.prompt)
            said = actor.compute(rows, ("logprobs",), 1.0)["logprobs"][0, len(request.prompt) :]
            worst = max(worst, float((said - torch.tensor(answer.logprobs)).abs().max()))
    return worst


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"targets": ["q_proj", "layers.1.mlp.*"], "rslora": True, "rank": 3}])
def test_after_every_update_it_samples_what_the_policy_computes(engine, walks, lora):
    """Also behind a prompt whose keys and values the adapters before have left in the cache. No file stays."""
    actor, before = policy(**lora), None
    engine.base_version = None
    for version in (1, 2, 3):
        redraw(actor, version)
        engine.update_weights(version, actor.weights())
        found = engine.generate(REQUESTS, PLAIN)
        assert {number for group in found for answer in group for number in answer.versions} == {version}
        assert off(actor, found) < 1e-4
        assert before is None or off(actor, before) > 0.1, "adapters that change nothing"
        before = found
    assert walks == {"base": 1, "alone": 3} and not list(engine.context.folder.glob("adapter*"))


@needs_vllm
@pytest.mark.slow
def test_weights_beside_the_adapters_come_again_where_they_changed(engine, walks):
    actor = policy()
    engine.base_version = None
    engine.update_weights(1, actor.weights())
    actor.copy_weights_from(policy(seed=1))
    redraw(actor, 2)
    engine.update_weights(2, actor.weights())
    assert off(actor, engine.generate(REQUESTS, PLAIN)) < 1e-4
    assert walks["base"] == 2
    engine.update_weights(3, ((name, 0.5 * tensor) for name, tensor in actor.weights()))  # whole weights, not adapters
    assert off(actor, engine.generate(REQUESTS, PLAIN)) > 0.1
    engine.update_weights(4, actor.weights())
    assert off(actor, engine.generate(REQUESTS, PLAIN)) < 1e-4
    assert walks["base"] == 3


@needs_vllm
@pytest.mark.slow
def test_what_vllm_says_of_adapters_is_said_with_key_and_cure(engine, tmp_path):
    with pytest.raises(ValueError, match=r"merge_lora=false: vLLM says: LoRA rank 9 is greater.*merge_lora=true"):
        engine.update_weights(5, policy(rank=9).weights())
    gpt2 = make(start("cpu"), {}, model_config=GPT2, packing=False)
    with pytest.raises(ValueError, match=r"vLLM says: GPT2LMHeadModel does not support LoRA yet;.*merge_lora=true"):
        start_engine(gpt2, tmp_path)


@needs_vllm
@pytest.mark.slow
def test_the_ranks_are_those_of_vllm():
    from vllm.config.lora import MaxLoRARanks

    assert typing.get_args(MaxLoRARanks) == RANKS


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "ranks_an_engine"), [(1, 1), (2, 1), (2, 2)])
def test_a_run_samples_what_it_trains(ranks, ranks_an_engine, tmp_path, sized):
    small = [word for word in sized("warmup=none", "actor/lora=lora") if "head_dim" not in word]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if ranks > 1 else []
    tensor_parallel = f"+rollout.engine_args.tensor_parallel_size={ranks_an_engine}"
    memory = "rollout.engine_args.gpu_memory_utilization=0.1"
    apart = "rollout.engine.merge_lora=false"
    rows = run(tmp_path, [sys.executable, *torchrun], *small, apart, tensor_parallel, memory, "actor.optimizer.lr=0.05")
    gaps = [row["rollout/logprob_gap_max"] for row in rows if "rollout/logprob_gap_max" in row]
    assert len(gaps) == 3 and max(gaps) < 1e-4
    assert rows[-1]["staleness/mean"] == 0


@pytest.mark.parametrize(("rank", "most"), [(1, 1), (2, 8), (16, 16), (200, 256)])
def test_there_is_room_for_the_rank(rank, most):
    assert room(Lora(**lora_options(rank=rank))) == {"enable_lora": True, "max_lora_rank": most}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["actor/lora=none"], r"merge_lora=false: the policy has no adapters; set actor/lora=lora"),
        (["actor.lora.rank=513"], r"actor.lora.rank=513: vLLM applies adapters of a rank up to 512; lower it"),
        (["rollout.engine.sleep_level=2"], r"rollout.engine.sleep_level=2: the engine would drop"),
        (["+rollout.engine_args.max_loras=2"], r"rollout.engine_args.max_loras: the run sets it"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(resolved, changes, message):
    apart = ["rollout=vllm", "actor/lora=lora", "rollout.engine.merge_lora=false"]
    Components(resolved(*apart))
    with pytest.raises(Problems, match=message):
        Components(resolved(*apart, *changes))
