"""What a forward reads of media: tensors and positions; and which part of a model reads text."""

import pytest
import torch
from tensordict import TensorDict

from rft.actor.forward.backbone import language_part, media_elements, run_backbone
from rft.actor.forward.media import MediaInputs, own_positions, row_positions
from rft.actor.heads import LanguageNetwork
from rft.actor.lora.adapters import linear_layers
from rft.actor.packing.attention import use_packed_attention, use_padded_attention
from rft.actor.packing.micro_batches import MicroBatcher, model_cost, row_work
from rft.batch.media import concat_media, media_entries
from rft.distributed import start
from tests.e2e.host_waits import HostWaits
from tests.families import family
from tests.families.rows import batch_of, encoder, rows
from tests.helpers import small_actor

CPU = torch.device("cpu")


def test_the_tensors_of_the_probe_follow_those_of_the_rows():
    one = family("llava")
    encode = encoder(one)
    facts, batch = encode.media_facts, batch_of(encode, rows(one))
    own = concat_media(media_entries(batch))
    without = MediaInputs(own, facts).all_tensors(torch.bfloat16, CPU)
    beside = MediaInputs(own, facts, with_probe=True).all_tensors(torch.bfloat16, CPU)
    assert without["pixel_values"].dtype == torch.bfloat16 and len(without["pixel_values"]) == 3
    assert torch.equal(beside["pixel_values"][:3], without["pixel_values"]) and len(beside["pixel_values"]) == 4
    alone = MediaInputs({}, facts, with_probe=True).all_tensors(torch.float32, CPU)
    assert torch.equal(alone["pixel_values"], facts.probe.media["pixel_values"])


def test_only_rows_with_media_of_such_a_model_have_positions_of_their_own():
    one = family("qwen2_vl")
    encode, model = encoder(one), one.model()
    prompt = encode.prompt(rows(one)[0])
    columns = {
        "input_ids": torch.tensor([prompt]),
        "mm_token_type_ids": torch.tensor([prompt.column("mm_token_type_ids")]),
    }
    positions, delta = own_positions(model.base_model, columns, prompt.media)
    count = prompt.count(one.placeholders["image"])
    side = round(count**0.5)
    assert positions.shape == (3, 1, len(prompt)) and int(delta) == side - count  # an image moves on by its side
    assert own_positions(model.base_model, columns, {}) is None
    other = family("llava")
    assert own_positions(other.model().base_model, columns, prompt.media) is None


def test_positions_of_rows_follow_them_in_any_order():
    one = family("qwen2_vl")
    encode, backbone = encoder(one), one.model().base_model
    batch = batch_of(encode, rows(one))
    entries, found = media_entries(batch), []
    for order in ([0, 1, 2, 3], [2, 3, 0, 1]):
        media = concat_media(entries[row] for row in order)
        found.append(row_positions(backbone, batch["tokens"], media, order))
    assert found[0].equal(found[1]) and found[0].shape == (3, *batch["loss_mask"].shape)
    for row, length in enumerate(batch["tokens", "attention_mask"].sum(1).tolist()):
        alone = batch[row : row + 1]["tokens"].apply(lambda column, end=length: column[:, :end], batch_size=[1])
        own = row_positions(backbone, alone, concat_media(entries[row : row + 1]), [0])
        own = torch.arange(length).expand(3, 1, -1) if own is None else own
        assert found[0][:, row, :length].equal(own[:, 0])


@pytest.mark.parametrize("packing", [True, False])
def test_positions_are_counted_before_rows_are_on_the_device(packing):
    """What a forward still reads is what transformers' towers read."""
    one, world = family("qwen2_5_vl"), start("cpu")
    encode = encoder(one)
    batch, network = batch_of(encode, rows(one)), LanguageNetwork(one.model())
    if packing:
        use_packed_attention(network.model, "actor", encode.media_facts)
    else:
        use_padded_attention(network.model, encode.media_facts)
    batcher = MicroBatcher(10**4, packing, False, network.model.base_model)
    [micro] = batcher.micro_batches(batch, batch[:1], world, None)
    found, media = [], MediaInputs(micro.media, encode.media_facts, positions=micro.positions)
    with HostWaits(found):
        run_backbone(network.model.base_model, micro.batch["tokens"], micro.layout, media)
    assert found and {line.split(" at ")[1] for line in found} == {
        "backbone.py: states: Tensor = module(**inputs, use_cache=False).last_hidden_state"
    }


@pytest.mark.parametrize(("name", "path"), [("llava", "model.language_model"), ("qwen2_5_omni_thinker", "model")])
def test_towers_are_no_part_of_the_language_model(name, path):
    model = family(name).model()
    part = language_part(model)
    assert part is model.get_submodule(path)
    names, head = linear_layers(model)
    assert head == ["lm_head"] and names and all(name.startswith(f"{path}.") for name in names)
    text = small_actor(start("cpu")).plain_model()
    assert language_part(text) is text.base_model


def test_work_grows_with_the_media_of_a_row():
    one = family("llava")
    encode, model = encoder(one), one.model()
    batch = batch_of(encode, rows(one))
    cost = model_cost(model, encode.media_facts)
    assert cost.media > 0 and model_cost(model).media == 0
    numbers = media_elements(batch)
    pixels = encode.media_facts.probe.media["pixel_values"].numel()
    assert numbers.tolist() == [pixels, 0, 2 * pixels, 0]
    plain = row_work(cost._replace(media=0.0), batch, torch.zeros(4, dtype=torch.int64))
    work = row_work(cost, batch, torch.zeros(4, dtype=torch.int64))
    assert torch.allclose(work - plain, cost.media * numbers)
    assert media_elements(TensorDict({}, [2])).tolist() == [0, 0]
