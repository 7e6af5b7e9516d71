"""Static steps, as a CUDA graph records them, against the steps of the growing cache."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rft.rollout.engine.base import Request
from rft.rollout.engine.decoding import decoder
from rft.rollout.engine.decoding.decoder import step_attention, step_obstacle
from tests.e2e.host_waits import HostWaits
from tests.helpers import hf_engine
from tests.rollout.word_models import MODELS, SIZES, build, prompts_of, sampling

MORE = {
    "qwen2": {},
    "mixtral": {"num_local_experts": 4},
    "phi": {"num_key_value_heads": 4},
    "olmo2": {},
    "doge": {},  # has a mask for each head
}


def model_of(name):
    """One of MODELS or MORE, in float64 where it can be."""
    if name in MODELS:
        return build(name)
    torch.manual_seed(0)
    shape = {key: value for key, value in SIZES.items() if key != "head_dim"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape | MORE[name]))
    return model.to(torch.float32 if name == "mixtral" else torch.float64).eval()  # torch has no experts in float64


def flat(groups):
    return [completion for group in groups for completion in group]


def same(found, expected):
    """Equal tokens and reasons, and log-probabilities to 1e-5."""
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.versions == other.versions


def engines(name, tokenizer, max_rows=64):
    model = model_of(name)
    return [hf_engine(model, tokenizer, max_rows, cuda_graphs) for cuda_graphs in (True, False)]


@pytest.mark.parametrize("name", ["qwen3", "llama", *MORE])
def test_tokens_are_those_of_the_growing_cache(tokenizer, name):
    """Prompts of several lengths, rows that end at different times, and more tokens than the first storage has."""
    static, growing = engines(name, tokenizer)
    requests = [Request(p, [100 * i + j for j in range(4)]) for i, p in enumerate(prompts_of(3, 8, 8, 30, 2))]
    options = sampling(max_new_tokens=80, top_k=30)
    found = static.generate(requests, options)
    assert len({len(c.tokens) for c in flat(found)}) > 4
    same(found, growing.generate(requests, options))


def test_stop_strings_waves_and_equal_prompts(tokenizer):
    static, growing = engines("qwen3", tokenizer, max_rows=5)
    for lengths in ((7, 7, 7), (4, 9, 1)):
        requests = [Request(prompt, [1, 2, 3, 4]) for prompt in prompts_of(*lengths)]
        options = sampling(max_new_tokens=30, stop=["w5", "w6 w1"])
        same(static.generate(requests, options), growing.generate(requests, options))


def test_new_weights_between_two_calls(tokenizer):
    static, growing = engines("llama", tokenizer)
    requests = [Request(prompt, [1, 2, 3]) for prompt in prompts_of(5, 2)]
    first = static.generate(requests, sampling())
    torch.manual_seed(9)
    weights = MODELS["llama"]().double().state_dict()
    for engine in (static, growing):
        engine.sleep()
        engine.update_weights(1, weights.items())
    second = static.generate(requests, sampling())
    assert [c.tokens for c in second[0]] != [c.tokens for c in first[0]]
    same(second, growing.generate(requests, sampling()))


@pytest.mark.parametrize("name", ["qwen3", "llama", "mixtral"])
def test_a_step_does_not_read_the_device_and_may_be_repeated(monkeypatch, tokenizer, name):
    """A graph can record it, after a call to warm up: neither addresses nor shapes change until a new one is due."""
    found, graphs, steps = [], [], []

    class Recorded:
        def __init__(self, function, example, name):
            self.function, self.rows, self.addresses = function, len(example), addresses(function.__self__)
            graphs.append((self.rows, function.__self__._layers[0].capacity))
            with HostWaits(found):
                function(example)

        def replay(self, tokens):
            assert len(tokens) == self.rows and addresses(self.function.__self__) == self.addresses
            steps.append(len(tokens))
            return self.function(tokens)

    def addresses(decoder):
        tensors = [decoder.padding, decoder._place, *decoder.model.parameters()]
        return [t.data_ptr() for t in (*tensors, *(s for layer in decoder._layers for s in layer._storage))]

    static, growing = engines(name, tokenizer)
    limits = [5, 20, 40, 80]
    requests = [Request(p, [100 * i + j for j in range(4)], limits) for i, p in enumerate(prompts_of(3, 8, 8, 30, 2))]
    expected = growing.generate(requests, sampling(max_new_tokens=80))
    monkeypatch.setattr(decoder, "CudaGraph", Recorded)
    monkeypatch.setattr(decoder, "RECORDED", "cpu")
    same(static.generate(requests, sampling(max_new_tokens=80)), expected)
    assert found == [] and len(steps) == max(len(c.tokens) for c in flat(expected)) - 1
    assert [rows for rows, _ in graphs] == sorted((rows for rows, _ in graphs), reverse=True)
    assert len({rows for rows, _ in graphs}) >= 3 and len({capacity for _, capacity in graphs}) >= 2
    assert len(graphs) < len(steps) / 5


@pytest.mark.parametrize(("name", "by_step"), [("qwen3", True), ("doge", False), ("eager", False), ("sliding", False)])
def test_padded_rows_attend_without_copies_of_keys(monkeypatch, tokenizer, name, by_step):
    """Two heads of keys serve four of queries. Rows without padding leave that to transformers."""
    heads = []

    def recorded(query, key, *arguments, **options):
        heads.append((query.shape[1:3], key.shape[1]))
        return attend(query, key, *arguments, **options)

    attend = decoder.scaled_dot_product_attention
    monkeypatch.setattr(decoder, "scaled_dot_product_attention", recorded)
    engine = hf_engine(model_of(name), tokenizer, 64)
    engine.generate([Request(prompt, [1, 2]) for prompt in prompts_of(5, 5)], sampling())
    assert heads == []
    engine.generate([Request(prompt, [1, 2]) for prompt in prompts_of(3, 8)], sampling())
    assert set(heads) == ({((2, 2), 2)} if by_step else set())


def test_which_models_cannot_attend_by_steps():
    for name in ("qwen3", "llama", *MORE):
        assert step_obstacle(model_of(name)) is None
    assert step_obstacle(build("sliding")).startswith("a mistral has layers that do not attend to all tokens")
    assert step_obstacle(build("eager")) == "a llama computes its attention by 'eager', not by 'sdpa'"
    own = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2))
    assert step_obstacle(own) == "a bloom has an attention of its own"


def test_attention_asked_for_something_else():
    """Transformers computes it, as in a model that attends by sdpa."""
    torch.manual_seed(0)
    module = torch.nn.Linear(1, 1)
    module.num_key_value_groups = 2
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    seen = torch.tensor([[True] * 5, [False, False, True, True, True]])[:, None, None]
    per_head = torch.where(torch.rand(2, 4, 1, 5) < 0.5, -1e9, 0.0)
    for mask, others in ((seen, {"dropout": 0.0}), (seen, {"position_bias": torch.randn(2, 4, 1, 5)}), (per_head, {})):
        found, none = step_attention(module, query, key, value, mask, scaling=0.3, **others)
        expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3, **others)
        torch.testing.assert_close(found, expected)
        assert none is None
