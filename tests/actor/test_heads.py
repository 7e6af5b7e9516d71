"""Columns of the networks against the plain logits of transformers, row by row and without any padding."""

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3ForCausalLM

from rft.actor.heads import LanguageNetwork, ValueNetwork, find_logit_shape
from rft.actor.init import load_model, read_config
from rft.actor.loading.tensor_names import name_backbone
from rft.actor.logprobs import _compiled
from tests.helpers import SIZES

F64 = torch.float64
MODELS = {
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    "qwen3 tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama tied, no groups": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen2, biases in attention": {"model_type": "qwen2", "tie_word_embeddings": False},
    "mistral, sliding window": {"model_type": "mistral", "sliding_window": 4},
    "phi, a bias in the head": {"model_type": "phi", "tie_word_embeddings": False},
    "gemma2, capped": {"model_type": "gemma2", "final_logit_softcapping": 3.0, "sliding_window": 4},
    "gemma2 without the cap": {"model_type": "gemma2", "final_logit_softcapping": None},
    "cohere, scaled": {"model_type": "cohere", "logit_scale": 0.5, "eos_token_id": None},
    "cohere2, scaled": {"model_type": "cohere2", "logit_scale": 2.0, "sliding_window": 4, "eos_token_id": None},
    "granite, divided": {"model_type": "granite", "logits_scaling": 0.8},
    "llama4_text": {"model_type": "llama4_text", "num_local_experts": 2, "intermediate_size_mlp": 24}
    | {"num_hidden_layers": 4, "attention_chunk_size": 4, "no_rope_layers": [1, 1, 0, 1]},
}
SHAPES = {
    "gemma2, capped": (1.0, 3.0),
    "cohere, scaled": (0.5, None),
    "cohere2, scaled": (2.0, None),
    "granite, divided": (1.25, None),
}
LENGTHS = [9, 2, 14, 5]


def build(**changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES | changes)).to(F64).eval()
    name_backbone(model)
    with torch.no_grad():  # biases and norms begin as 0 and 1, which would hide them
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def tokens_and_selection(width=14):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 23, (len(LENGTHS), max(LENGTHS)), generator=generator)
    select = torch.rand(ids.shape, generator=generator) < 0.6
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    pad = (0, width - max(LENGTHS))
    ids, mask, select = (torch.nn.functional.pad(c, pad) for c in (ids * mask, mask, select & mask))
    select[0, 0] = True  # no token predicts the first one
    return TensorDict({"input_ids": ids, "attention_mask": mask.long()}, batch_size=[len(LENGTHS)]), select


def by_row(model, tokens, select, temperature):
    """Log-probability and entropy of each selected token, of one unpadded row at a time."""
    logprobs, entropy = (torch.zeros(select.shape, dtype=F64) for _ in range(2))
    for row, length in enumerate(LENGTHS):
        ids = tokens["input_ids"][row, :length]
        logp = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
        for t in range(1, length):
            if select[row, t]:
                logprobs[row, t] = logp[t - 1, ids[t]]
                entropy[row, t] = -(logp[t - 1].exp() * logp[t - 1]).sum()
    return {"logprobs": logprobs, "entropy": entropy}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_columns_are_those_of_the_logits_row_by_row(name, temperature):
    model = build(**MODELS[name])
    tokens, select = tokens_and_selection()
    assert by_row(model, tokens, select, 1.0)["logprobs"].std() > 0.5, "the model is to have opinions"
    columns = LanguageNetwork(model)(tokens, select, ("entropy", "logprobs"), temperature)
    torch.testing.assert_close(columns, by_row(model, tokens, select, temperature), rtol=1e-9, atol=1e-9)
    assert not columns["logprobs"][:, 0].any()
    assert not columns["logprobs"][~select].any()


def test_gradients_of_a_tied_model_are_those_of_the_logits():
    model = build(**MODELS["qwen3 tied"])
    tokens, select = tokens_and_selection()
    mine, gradients = LanguageNetwork(model)(tokens, select, ("logprobs", "entropy"), 0.7), []
    for columns in (mine, by_row(model, tokens, select, 0.7)):
        total = (columns["logprobs"] * torch.linspace(-1, 1, 14)).sum() + columns["entropy"].sum()
        gradients.append(torch.autograd.grad(total, list(model.parameters())))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_a_compiled_network_has_the_same_columns(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    _compiled.cache_clear()
    model, given = build(**MODELS["qwen3"]), (*tokens_and_selection(), ("logprobs", "entropy"), 0.7)
    found, expected = LanguageNetwork(model, compiled=True)(*given), LanguageNetwork(model)(*given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert len(compiled) == 1, "the forward"
    _compiled.cache_clear()


@pytest.mark.parametrize("head", ["lm", "value"])
def test_the_width_of_the_padding_does_not_matter(head):
    model = build(**MODELS["llama"])
    network = LanguageNetwork(model) if head == "lm" else value_network(model)
    outputs = ("logprobs", "entropy") if head == "lm" else ("values",)
    narrow, wide = (
        network(*tokens_and_selection(), outputs, 0.7),
        network(*tokens_and_selection(width=31), outputs, 0.7),
    )
    for name in outputs:
        torch.testing.assert_close(wide[name][:, :14], narrow[name], rtol=1e-10, atol=1e-10)
        assert not wide[name][:, 14:].any()


def test_only_the_outputs_asked_for_come_back():
    network, (tokens, select) = LanguageNetwork(build(**MODELS["qwen3"])), tokens_and_selection()
    assert list(network(tokens, select, ("logprobs",), 1.0)) == ["logprobs"]


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_batch_without_selected_tokens_has_zero_gradients_everywhere(head):
    model = build(**MODELS["qwen3"])
    network = LanguageNetwork(model) if head == "lm" else value_network(model)
    tokens, select = tokens_and_selection()
    column = network(tokens, torch.zeros_like(select), ("logprobs",), 1.0)["logprobs" if head == "lm" else "values"]
    assert column.shape == select.shape
    column.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in network.parameters())


def value_network(model):
    network = ValueNetwork(model.base_model).to(F64)
    with torch.no_grad():
        network.head.weight.normal_(generator=torch.Generator().manual_seed(2))
        network.head.bias.fill_(0.3)
    return network


def test_the_value_at_t_is_that_of_the_state_before_token_t():
    model = build(**MODELS["qwen3"])
    network, (tokens, select) = value_network(model), tokens_and_selection()
    expected = torch.zeros(select.shape, dtype=F64)
    for row, length in enumerate(LENGTHS):
        states = model.base_model(input_ids=tokens["input_ids"][row, None, :length]).last_hidden_state[0]
        for t in range(1, length):
            if select[row, t]:
                expected[row, t] = network.head.weight[0] @ states[t - 1] + 0.3
    torch.testing.assert_close(network(tokens, select, ("values",), 0.7)["values"], expected, rtol=1e-9, atol=1e-9)


def test_a_new_value_head_says_zero():
    network, (tokens, select) = ValueNetwork(build(**MODELS["qwen3"]).base_model), tokens_and_selection()
    assert not network(tokens, select, ("values",), 1.0)["values"].any()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("initializer_range", [0.02, 0.4])
def test_the_scale_and_the_cap_of_the_logits_are_found(name, initializer_range):
    """At the usual range of a new model its logits are so small that the cap does not show by itself."""
    config = AutoConfig.for_model(**SIZES | MODELS[name] | {"initializer_range": initializer_range})
    shape = find_logit_shape(load_model(None, config, 0), "actor.path")
    assert (shape.scale, shape.cap) == SHAPES.get(name, (1.0, None))


class Tripled(Qwen3ForCausalLM):
    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = 3 * output.logits
        return output


def test_logits_that_change_in_an_unknown_way_are_refused():
    config = AutoConfig.for_model(**SIZES, model_type="qwen3")
    with pytest.raises(ValueError, match=r"^critic\.path: Tripled changes its logits after the head .*logit_scale"):
        LanguageNetwork(Tripled(config), "critic.path")


def test_a_new_model_is_drawn_from_the_seed_alone():
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = read_config(None, {"model_type": "qwen3", **sizes}, 31, "actor")
    assert config.vocab_size == 31
    before = torch.get_rng_state()
    first, again, other = (load_model(None, config, seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("path", "model_config", "message"),
    [
        (None, None, r"^critic: set one of critic\.path .* and critic\.model_config"),
        ("x", {"model_type": "qwen3"}, r"^critic: set one of"),
        ("./no/such/folder", None, r"^critic\.path: no model can be read from '\./no/such/folder'"),
        (None, {"model_type": "qwen33"}, r"^critic\.model_config: transformers cannot use it \(.*qwen33"),
        (None, {}, r"^critic\.model_config: transformers cannot use it"),
        (
            None,
            {"model_type": "qwen3", "vocab_size": 5},
            r"^critic\.model_config: transformers cannot use it \(.*vocab_size",
        ),
    ],
)
def test_a_model_that_cannot_be_had(path, model_config, message):
    with pytest.raises(ValueError, match=message):
        read_config(path, model_config, 10, "critic")
