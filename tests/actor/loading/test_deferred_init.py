"""A new model is drawn tensor by tensor, bit by bit as `from_config` of transformers draws it whole."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from rft.actor.init import init_without_loading, load_model, load_with_head, read_config
from rft.actor.loading.deferred_init import Drawing, NotRecordedError
from tests.actor.loading.stored_on_ranks import MODELS
from tests.helpers import MODEL, SIZES

PLAIN = {name: value for name, value in SIZES.items() if name not in ("vocab_size", "head_dim")}
KINDS = {
    **{name: options for name, options in MODELS.items() if name != "large"},
    "gemma3": MODEL | {"model_type": "gemma3_text", "pad_token_id": 0},  # zeros one row of the embedding
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4},  # scales some weights after drawing all
    "mixtral": PLAIN | {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3_next": PLAIN
    | {"model_type": "qwen3_next", "num_experts": 4, "moe_intermediate_size": 8},  # computes weights
}
REPLACING = PLAIN | {"model_type": "modernbert-decoder"}  # it replaces the data of a bias


def drawn(model, drawing):
    """All parameters of a model, of which the drawing has those that are on the meta device."""
    tensors = dict(drawing.items())
    assert tensors.keys() == {name for name, parameter in model.named_parameters() if parameter.is_meta}
    return {n: tensors[n][...] if n in tensors else parameter for n, parameter in model.named_parameters()}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def compare(load):
    """The drawing of a model that has what the whole model has."""
    whole, drawing = load(None), Drawing()
    model = load(drawing)
    assert same(drawn(model, drawing), dict(whole.named_parameters()))
    assert same(dict(model.named_buffers()), dict(whole.named_buffers()))
    every = {"remove_duplicate": False}
    assert dict(model.named_parameters(**every)).keys() == dict(whole.named_parameters(**every)).keys()
    return drawing


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_has_the_numbers_of_the_whole_one(kind):
    config = read_config(None, KINDS[kind], 23, "actor")
    drawing = compare(lambda drawing: load_model(None, deepcopy(config), 3, drawing=drawing))
    assert len(list(drawing.items())) > 15


@pytest.mark.parametrize("head", ["score", "step"])
def test_a_classifier_has_the_numbers_of_the_whole_one(head):
    config = read_config(None, MODEL, 19, "actor")
    drawing = compare(lambda drawing: load_with_head(None, deepcopy(config), 3, 5, head, "actor", drawing))
    assert "score.weight" in dict(drawing.items())


def test_a_model_that_cannot_be_recorded_is_drawn_whole():
    config, drawing = read_config(None, REPLACING, 23, "actor"), Drawing()
    model = load_model(None, deepcopy(config), 3, drawing=drawing)
    assert not any(parameter.is_meta for parameter in model.parameters()) and not dict(drawing.items())
    assert same(dict(model.named_parameters()), dict(load_model(None, config, 3).named_parameters()))


def test_the_plan_draws_nothing():
    drawing, config = Drawing(), read_config(None, MODEL, 19, "actor")
    with init_without_loading():
        model = load_model(None, config, 3, drawing=drawing)
    assert all(parameter.is_meta for parameter in model.parameters()) and not dict(drawing.items())


def test_the_generator_of_the_process_is_where_it_was():
    config, drawing = read_config(None, MODEL, 19, "actor"), Drawing()
    before = torch.get_rng_state()
    model = load_model(None, config, 3, drawing=drawing)
    drawn(model, drawing)
    assert torch.equal(torch.get_rng_state(), before)


class Layers(nn.Module):
    """Weights of every kind of history."""

    def __init__(self, generator):
        super().__init__()
        self.made = nn.Parameter(torch.randn(30, generator=generator))
        self.written = nn.Parameter(torch.empty(4, 5))
        self.cut = nn.Parameter(torch.ones(6, 5))
        self.computed = nn.Parameter(torch.ones(7) / 3)
        self.redrawn = nn.Parameter(torch.empty(40, 50))
        self.register_buffer("kept", torch.arange(6.0))
        self.register_buffer("scaled", torch.rand(6) * self.kept)
        with torch.no_grad():
            self.written.uniform_(1, 2, generator=generator).mul_(torch.arange(5)).log_()
            self.cut[2:4, 1:].T.normal_()
            self.cut[0].zero_()
            self.cut[1].copy_(self.cut[2] + self.scaled[:5].to(self.cut.device))
        nn.init.trunc_normal_(self.redrawn)
        assert not self.redrawn.is_meta and self.computed.detach()[0].item() > 0.3


def test_all_that_writes_into_a_tensor_is_repeated_in_its_place():
    torch.manual_seed(1)
    whole = Layers(torch.Generator().manual_seed(2))
    after = torch.rand(3)
    torch.manual_seed(1)
    with Drawing() as drawing:
        model = Layers(torch.Generator().manual_seed(2))
    assert torch.equal(torch.rand(3), after)
    drawing.keep(model)
    torch.manual_seed(5)
    assert set(dict(drawing.items())) == {"made", "written", "cut", "redrawn"}
    assert same(drawn(model, drawing), dict(whole.named_parameters()))
    assert same(dict(model.named_buffers()), dict(whole.named_buffers()))


@pytest.mark.parametrize("write", [lambda a, b: torch.add(a, b, out=b), lambda a, b: torch._foreach_zero_([a, b])])
def test_writing_elsewhere_than_into_the_first_argument_is_refused(write):
    with Drawing(), pytest.raises(NotRecordedError, match=r"aten\.(add\.out|_foreach_zero_)"):
        write(torch.ones(2), torch.ones(2))
