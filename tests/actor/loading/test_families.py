"""Classifiers of models with media: the scores of a network are those of the class, which reads files of both kinds."""

import pytest
import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig
from transformers.modeling_layers import GenericForSequenceClassification

from rft.actor.init import load_with_head
from rft.actor.loading.export import exported, write_model
from rft.actor.packing.attention import use_packed_attention
from rft.actor.packing.layout import pack_layout
from rft.actor.scorers import CLASSIFIERS, ScoreNetwork, check_classifier, media_classifier
from rft.batch.media import concat_media, media_entries
from tests.families import family
from tests.families.rows import OMNI, PACKED, WITH_BACKBONE, batch_of, encoder, inputs_of, rows

FAST = ("qwen2_5_vl", "llava", "gemma3", "qwen2_audio")
NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in WITH_BACKBONE]


def loaded(path, head, pad):
    return load_with_head(str(path), AutoConfig.from_pretrained(path), 0, pad, head, "actor").eval()


def row_by_row(model, batch, stacked=frozenset()):
    """The logits of each row without padding, by the call of the model itself."""
    found = []
    for row, entry in zip(batch, media_entries(batch), strict=True):
        real = row["tokens", "attention_mask"].bool()
        columns = {name: column[real][None] for name, column in row["tokens"].items()}
        media = concat_media([entry])
        with torch.no_grad():
            found.append(model(**columns, **{k: t[None] if k in stacked else t for k, t in media.items()}).logits[0])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_score_is_that_of_the_class_with_files_of_the_language_model_and_its_own(name, tmp_path):
    one = family(name)
    encode = encoder(one)
    facts, pad = encode.media_facts, encode.processor.tokenizer.pad_token_id
    language = one.model()
    language.save_pretrained(tmp_path / "language")
    model = loaded(tmp_path / "language", "score", pad)
    assert type(model).__name__.endswith("ForSequenceClassification")
    for (stored, own), other in zip(model.base_model.named_parameters(), language.base_model.parameters(), strict=True):
        assert torch.equal(own, other), stored
    batch = batch_of(encode, rows(one))
    expected = torch.stack(row_by_row(model, batch, facts.stacked))[:, 0]
    assert expected.std() > 1e-3
    network = ScoreNetwork(model)
    media = inputs_of(network, batch, facts)
    with torch.no_grad():
        found = network(batch["tokens"], batch["loss_mask"], ("score",), 1.0, media=media)["score"]
    torch.testing.assert_close(found.sum(1), expected, rtol=1e-4, atol=1e-5)
    write_model(model, ((key, model.state_dict()[key]) for key in exported(model)), tmp_path / "own", torch.float32)
    config = AutoConfig.from_pretrained(tmp_path / "own")
    check_classifier(config, "score", "path")
    again = CLASSIFIERS["score"].class_of(config).from_pretrained(tmp_path / "own", config=config).eval()
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in model.state_dict().items())
    repeated = torch.stack(row_by_row(again, batch, facts.stacked))[:, 0]
    torch.testing.assert_close(repeated, expected, rtol=1e-5, atol=1e-6)
    if name in PACKED:
        use_packed_attention(model, "actor", facts)
        layout = pack_layout(batch, torch.arange(len(batch)))
        media = inputs_of(network, batch, facts, layout=layout)
        with torch.no_grad():
            packed = network(batch["tokens"], batch["loss_mask"], ("score",), 1.0, layout, media)["score"]
        torch.testing.assert_close(packed.sum(1), expected, rtol=1e-4, atol=1e-5)


def test_a_token_classifier_scores_every_token(tmp_path):
    one = family("qwen2_5_vl")
    encode = encoder(one)
    one.model().save_pretrained(tmp_path)
    model = loaded(tmp_path, "step", encode.processor.tokenizer.pad_token_id)
    batch = batch_of(encode, rows(one))
    logits = row_by_row(model, batch)
    real = batch["tokens", "attention_mask"].sum(1)
    assert [tuple(one.shape) for one in logits] == [(int(count), 2) for count in real]


def test_what_transformers_has_stays_and_a_family_without_a_backbone_has_none():
    config = family("gemma3").config
    made = CLASSIFIERS["score"].class_of(config)
    assert type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and made is CLASSIFIERS["score"].kind
    assert media_classifier(type(family(OMNI).config), GenericForSequenceClassification) is None
    assert media_classifier(type(family("llava").config), GenericForSequenceClassification) is media_classifier(
        type(family("llava").config), GenericForSequenceClassification
    )
