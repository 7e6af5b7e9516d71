"""Names of tensors in published checkpoints, for engines that know those."""

import weakref

import pytest
import torch
from transformers import AutoConfig, Qwen3VLMoeConfig

from rft.actor.init import meta_model
from rft.actor.loading.stored import MappedTensor, StoredWeights
from rft.actor.loading.tensor_names import checkpoint_names, renamed
from tests.families import family
from tests.families.rows import READ
from tests.helpers import SIZES

EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}


@pytest.mark.parametrize("name", READ)
def test_loading_maps_them_to_those_of_the_model(name):
    model = family(name).model().to("meta")
    tensors, names = model.state_dict(), checkpoint_names(model)
    assert names.keys() == tensors.keys() and len({*names.values()}) == len(names)
    stored = {names[key]: MappedTensor(tensor) for key, tensor in tensors.items()}
    assert StoredWeights(model, stored).shapes == {key: list(tensor.shape) for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2_5_vl", {"model.visual.merger.ln_q.": "visual.merger.ln_q.", "model.language_model.": "model."}),
        ("qwen3_vl", {"model.visual.": "model.visual.", "model.language_model.": "model.language_model."}),
        (
            "llava",
            {
                "model.vision_tower.encoder.": "vision_tower.vision_model.encoder.",
                "model.multi_modal_projector.": "multi_modal_projector.",
                "model.language_model.": "language_model.model.",
                "lm_head.": "language_model.lm_head.",
            },
        ),
        ("gemma3", {"model.vision_tower.encoder.": "vision_tower.vision_model.encoder."}),
        (
            "qwen2_audio",
            {
                "model.audio_tower.": "audio_tower.",
                "model.multi_modal_projector.": "multi_modal_projector.",
                "model.language_model.": "language_model.model.",
                "lm_head.": "language_model.lm_head.",
            },
        ),
    ],
)
def test_they_are_those_of_the_published_files(name, changes):
    names = checkpoint_names(family(name).model().to("meta"))
    for own, published in changes.items():
        members = [key for key in names if key.startswith(own)]
        assert members and [names[key] for key in members] == [published + key.removeprefix(own) for key in members]


def test_they_do_not_depend_on_the_files_that_the_model_was_read_from():
    model = family("llava").model().to("meta")
    expected = checkpoint_names(model)
    StoredWeights(model, {key: MappedTensor(tensor) for key, tensor in model.state_dict().items()})
    assert model._weight_conversions == [] and checkpoint_names(model) == expected


def test_text_and_stacked_experts_keep_the_names_of_the_model():
    for kind in ("qwen3", "qwen3_moe"):
        assert checkpoint_names(meta_model(AutoConfig.for_model(kind, **SIZES | EXPERTS))) == {}
    vision = family("qwen3_vl").config.vision_config.to_dict()
    assert checkpoint_names(meta_model(Qwen3VLMoeConfig(text_config=SIZES | EXPERTS, vision_config=vision))) == {}


def test_tensors_are_renamed_one_after_another():
    alive = []

    def tensors():
        for name in ("a", "b"):
            assert not any(reference() is not None for reference in alive)
            tensor = torch.zeros(1)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    found = []
    for name, tensor in renamed(tensors(), {"a": "c"}):
        found.append(name)
        del tensor
    assert found == ["c", "b"]
