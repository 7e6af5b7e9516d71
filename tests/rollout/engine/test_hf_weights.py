"""New weights in the engine: they replace the tensors of the model, which must all be there."""

import pytest
import torch

from rft.rollout.engine.base import Request
from tests.helpers import hf_engine
from tests.rollout.word_models import MODELS, build, prompts_of, sampling


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_new_weights_change_the_text_and_share_storage(tokenizer, name):
    engine = hf_engine(build(name), tokenizer, 64)
    requests = [Request(prompts_of(5)[0], [1, 2])]
    before = engine.generate(requests, sampling())
    assert {v for c in before[0] for v in c.versions} == {0}
    torch.manual_seed(9)
    actor = MODELS[name]().double()
    engine.update_weights(3, ((key, value) for key, value in actor.state_dict().items()))
    after = engine.generate(requests, sampling())
    assert {v for c in after[0] for v in c.versions} == {3}
    assert after[0][0].tokens != before[0][0].tokens
    ours, theirs = engine.model.state_dict(), actor.state_dict()
    assert all(ours[key].data_ptr() == theirs[key].data_ptr() for key in theirs)
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())
    assert all(parameter.requires_grad for parameter in actor.parameters())
    again = hf_engine(actor, tokenizer, 64).generate(requests, sampling())
    assert [c.tokens for c in again[0]] == [c.tokens for c in after[0]]


def test_one_name_of_tied_weights_is_enough(tokenizer):
    engine = hf_engine(build(), tokenizer, 64)
    tensors = {key: value.clone() for key, value in build().state_dict().items() if key != "lm_head.weight"}
    engine.update_weights(1, tensors.items())
    assert engine.model.lm_head.weight.data_ptr() == tensors["model.embed_tokens.weight"].data_ptr()


def test_weights_of_another_type_are_converted(tokenizer):
    engine = hf_engine(build().float(), tokenizer, 64)
    engine.update_weights(1, build().state_dict().items())
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}


def test_weights_must_be_all_there_and_known(tokenizer):
    engine = hf_engine(build(), tokenizer, 64)
    tensors = build().state_dict()
    with pytest.raises(AssertionError, match=r"no weight 'head\.weight'"):
        engine.update_weights(1, [*tensors.items(), ("head.weight", torch.zeros(1))])
    tensors.pop("model.norm.weight")
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        engine.update_weights(1, tensors.items())
