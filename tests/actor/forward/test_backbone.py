"""Rows with media have the log-probabilities of the model's own call: in any order, padded, packed, with a probe."""

from dataclasses import replace

import pytest
import torch

from rft.actor.forward.logits import FORBIDDEN
from rft.actor.packing.attention import use_packed_attention
from rft.actor.packing.layout import pack_layout
from tests.families import family
from tests.families.rows import OMNI, PACKED, READ, batch_of, columns, encoder, inputs_of, network_of, rows

ONE_KIND = [(OMNI, ("image",)), (OMNI, ("audio",))]  # by default its rows have both


def made(name, kinds=None):
    """A network, its encoder, the rows with media of these kinds and their batch."""
    one = family(name)
    encode, given = encoder(one), rows(replace(one, kinds=kinds or one.kinds))
    return network_of(one.model(), encode), encode, given, batch_of(encode, given)


@torch.no_grad()
def by_the_model(network, encode, row):
    """Log-probabilities of the tokens behind the first, by a call of the model with what its processor returns."""
    one, (ids, trains) = encode.processor, encode.example(row)
    inputs = {name: torch.tensor([ids.column(name)]) for name in ids.columns}
    media = {name: t.to(network.model.dtype) if t.is_floating_point() else t for name, t in (ids.media or {}).items()}
    inputs |= {name: t[None] if name in one.facts.stacked else t for name, t in media.items()}
    tokens = torch.tensor([ids])
    logits = network.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs).logits[0]
    logits[:, one.placeholders] = FORBIDDEN
    found = logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return found[torch.tensor(trains[1:])]


@torch.no_grad()
@pytest.mark.parametrize(("name", "kinds"), [*((name, None) for name in READ), *ONE_KIND])
def test_padded_rows_have_the_numbers_of_the_models_own_call(name, kinds):
    network, encode, given, batch = made(name, kinds)
    facts, mask = encode.media_facts, batch["loss_mask"]
    found = columns(network, batch, facts)
    for number, row in enumerate(given):
        expected = by_the_model(network, encode, row)
        torch.testing.assert_close(found["logprobs"][number][mask[number]], expected, rtol=0, atol=1e-5)
    assert found["entropy"][mask].isfinite().all() and (found["entropy"][mask] > 0).all()
    turned = columns(network, batch[[2, 3, 0, 1]], facts)["logprobs"]
    torch.testing.assert_close(turned[[2, 3, 0, 1]], found["logprobs"], rtol=0, atol=1e-5)
    beside = columns(network, batch, facts, with_probe=True)["logprobs"]
    torch.testing.assert_close(beside, found["logprobs"], rtol=0, atol=1e-5)
    other = batch_of(encode, [given[0] | {"prompt": given[2]["prompt"][:1]}])
    assert len(other["response_mask"][0]) != len(batch["response_mask"][0]), "another image takes other tokens"


@torch.no_grad()
@pytest.mark.parametrize(("name", "kinds"), [*((name, None) for name in PACKED), *ONE_KIND])
def test_packed_rows_have_the_numbers_of_padded_ones(name, kinds):
    network, encode, _, batch = made(name, kinds)
    assert_packed_as_padded(network, batch, encode.media_facts)


def assert_packed_as_padded(network, batch, facts):
    """Compares them with and without the probe of the media. Afterwards the network computes packed rows."""
    padded = columns(network, batch, facts)["logprobs"]
    use_packed_attention(network.model, "actor", facts)
    layout = pack_layout(batch, torch.zeros(len(batch), dtype=torch.int64))
    for with_probe in (False, True):
        media = inputs_of(network, batch, facts, with_probe, layout)
        packed = network(batch["tokens"], batch["loss_mask"], ("logprobs",), 1.0, layout, media)["logprobs"]
        torch.testing.assert_close(packed, padded, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "why"), [("gemma3", "mixes rows"), ("qwen2_audio", "cannot be replaced")])
def test_a_model_that_cannot_pack_its_media_says_so(name, why):
    network, encode, *_ = made(name)
    with pytest.raises(ValueError, match=rf"actor\.packing: .*{why}.*set actor\.packing=false"):
        use_packed_attention(network.model, "actor", encode.media_facts)
