"""Static steps, as a CUDA graph records them, against the steps of the growing cache."""

import pytest
import torch

from rft.rollout.engine.base import Request
from rft.rollout.engine.decoding import cuda_graphs
from tests.e2e.host_waits import HostWaits
from tests.helpers import hf_engine
from tests.rollout.word_models import MODELS, MORE, build, prompts_of, sampling


def flat(groups):
    return [completion for group in groups for completion in group]


def same(found, expected):
    """Equal tokens and reasons, and log-probabilities to 1e-5."""
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.versions == other.versions


def engines(name, tokenizer, max_rows=64):
    model = build(name)
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


@pytest.mark.parametrize(
    ("name", "options", "recorded"),
    [
        ("qwen3", {}, "_step"),
        ("llama", {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}, "_step"),
        pytest.param("mixtral", {"temperature": 0.0}, "_step", marks=pytest.mark.slow),
        ("qwen3", {"top_p": 0.9}, "_logits"),  # a draw by top-p alone reads how many tokens it must sort
    ],
)
def test_a_step_may_be_recorded(monkeypatch, tokenizer, name, options, recorded):
    """It reads no number of the device, and neither addresses nor shapes nor numbers of the host change before another
    step is recorded."""
    found, graphs, steps = [], [], []

    class Recorded:
        def __init__(self, function, name):
            self.function, self.decoder = function, function.__self__
            self.state = state(self.decoder)
            assert function.__name__ == recorded
            graphs.append((len(self.decoder.rows), self.decoder._layers[0].capacity))

        def replay(self):
            assert state(self.decoder) == self.state
            steps.append(len(self.decoder.rows))
            drawn, self.decoder.drawn = self.decoder.drawn, -1
            with HostWaits(found):
                result = self.function()
            assert self.decoder.drawn == -1
            self.decoder.drawn = drawn
            return result

    def state(decoder):
        storage = [tensor for layer in decoder._layers for tensor in layer._storage]
        rows = [value for value in vars(decoder.rows).values() if isinstance(value, torch.Tensor)]
        others = [decoder.tokens, decoder.logprobs, decoder._place, *decoder.model.parameters()]
        return [(tensor.data_ptr(), tensor.shape) for tensor in (*storage, *rows, *others)]

    static, growing = engines(name, tokenizer)
    limits = [5, 20, 40, 80]
    requests = [Request(p, [100 * i + j for j in range(4)], limits) for i, p in enumerate(prompts_of(3, 8, 8, 30, 2))]
    expected = growing.generate(requests, sampling(max_new_tokens=80, **options))
    monkeypatch.setattr(cuda_graphs, "CudaGraph", Recorded)
    monkeypatch.setattr(cuda_graphs, "RECORDED", "cpu")
    same(static.generate(requests, sampling(max_new_tokens=80, **options)), expected)
    longest = max(len(c.tokens) for c in flat(expected))
    drawn = 1 + len(graphs) + len(steps)  # after the first token, the first step of each shape is not replayed
    assert found == [] and longest <= drawn < longest + cuda_graphs.StaticDecoder.ahead
    assert [rows for rows, _ in graphs] == sorted((rows for rows, _ in graphs), reverse=True)
    assert len({rows for rows, _ in graphs}) >= 3 and len({capacity for _, capacity in graphs}) >= 2
    assert len(graphs) < len(steps) / 5


def test_the_host_looks_at_the_rows_once_in_several_steps(monkeypatch, tokenizer):
    """A row that ends meanwhile keeps no later token, and the last block draws no token behind the largest limit."""
    looks = []
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda tensor: looks.append(tensor.shape) or torch.nonzero(tensor))
    static, growing = engines("qwen3", tokenizer)
    requests = [Request(prompt, [1, 2, 3], [3, 9, 19]) for prompt in prompts_of(4, 7)]
    found = static.generate(requests, sampling(max_new_tokens=19))
    assert [columns for rows, *columns in looks if columns] == [[9], [8], [2]]
    looks.clear()
    same(found, growing.generate(requests, sampling(max_new_tokens=19)))
    assert [columns for rows, *columns in looks if columns] == [[2]] + [[1]] * 17
