"""Rows with media for the models of `tests.families`, encoded as a run encodes them."""

from typing import Any

from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from rft.actor.forward.logits import forbidden_tokens
from rft.actor.forward.media import MediaInputs, row_positions
from rft.actor.heads import LanguageNetwork
from rft.actor.packing.layout import PackedLayout
from rft.actor.packing.micro_batches import forward_order
from rft.batch.collate import collate
from rft.batch.encoded import MediaFacts
from rft.batch.media import concat_media, media_entries
from rft.batch.trajectory import Trajectory, given_segments, to_row
from rft.data.encode.encoder import Encoder
from rft.data.encode.media.processor import ModelProcessor, slots_of_template
from tests.families import Family, frames, picture, sound

WITH_BACKBONE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "llava", "gemma3", "idefics3", "smolvlm",
                 "qwen2_audio")  # fmt: skip
OMNI = "qwen2_5_omni_thinker"  # one module with its head; reads images and audio
READ = (*WITH_BACKBONE, OMNI)
PACKED = tuple(name for name in READ if name not in ("gemma3", "qwen2_audio"))  # the others refuse to pack


def encoder(family: Family) -> Encoder:
    """The encoder of chats for a family; its `processor` has the slots of the family's template."""
    processor = ModelProcessor(family.processor, slots_of_template(family.processor, family.kinds))
    return Encoder(processor.tokenizer, "chat", None, processor=processor)


def network_of(model: PreTrainedModel, encode: Encoder) -> LanguageNetwork:
    """The network of a run with this model and encoder."""
    assert encode.processor is not None
    rows = len(model.get_output_embeddings().weight)
    forbidden = forbidden_tokens(rows, encode.processor.tokenizer, encode.media_facts)
    return LanguageNetwork(model, forbidden=forbidden)


def medium(family: Family, number: int) -> dict[str, Any]:
    """A content part of a kind, by turns if the family reads several, whose size depends on the number."""
    kind = family.kinds[number % len(family.kinds)]
    if kind == "image":
        return {"type": "image", "image": picture(number, 16 + 8 * number, 16)}
    if kind == "video":
        return {"type": "video", "video": frames(number, 4 + 2 * number if family.name != "internvl" else 4)}
    return {"type": "audio", "audio": {"array": sound(number, 3200 + 800 * number), "sampling_rate": 16000}}


def rows(family: Family) -> list[dict[str, Any]]:
    """Rows with one, none and two media, and two that quote a placeholder, in the prompt and in the response."""
    quote = family.processor.tokenizer.convert_ids_to_tokens(family.placeholders[family.kinds[0]])

    def asked(*parts: Any) -> list[dict[str, Any]]:
        content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
        return [{"role": "user", "content": content}]

    return [
        {"prompt": asked(medium(family, 0), "how many?"), "response": "2"},
        {"prompt": "hello", "response": "world"},
        {"prompt": asked(medium(family, 1), " and ", medium(family, 2), f"which {quote}?"), "response": f"one {quote}"},
        {"prompt": f"a {quote}", "response": "b"},
    ]


def batch_of(made: Encoder, given: list[dict[str, Any]]) -> TensorDict:
    """The batch of supervised rows, all of whose responses train."""
    trajectories = [Trajectory(given_segments(*made.example(row)), None, {}) for row in given]
    batch = collate([to_row(trajectory, group=n, unit=n) for n, trajectory in enumerate(trajectories)])
    batch["loss_mask"] = batch["response_mask"]
    return batch


def inputs_of(
    network: Any, batch: TensorDict, facts: MediaFacts, with_probe: bool = False, layout: PackedLayout | None = None
) -> MediaInputs:
    """The media of rows, in the order in which the forward has the rows."""
    entries, order = media_entries(batch), forward_order(len(batch), layout)
    media = concat_media(entries[row] for row in order)
    positions = row_positions(network.model.base_model, batch["tokens"], media, order)
    return MediaInputs(media, facts, with_probe, positions)


def columns(network: Any, batch: TensorDict, facts: MediaFacts, **options: Any) -> dict[str, Tensor]:
    """Log-probabilities and entropies of padded rows."""
    media = inputs_of(network, batch, facts, **options)
    found: dict[str, Tensor] = network(batch["tokens"], batch["loss_mask"], ("logprobs", "entropy"), 1.0, media=media)
    return found
