"""A processor makes tokens, columns and media of a text; what a text quotes stays a text."""

import pytest
import torch

from rft.data.encode.base import RichText
from rft.data.encode.encoder import Encoder
from rft.data.encode.media.processor import ModelProcessor
from rft.data.encode.truncation import PromptLimit
from tests.families import family
from tests.families.rows import encoder, medium, rows


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def text(words):
    return {"type": "text", "text": words}


def test_the_ids_are_those_of_the_processor():
    one = family("qwen2_5_vl")
    encode, [row, *_] = encoder(one), rows(one)
    prompt = encode.prompt(row)
    given = row["prompt"][0]["content"]
    made = one.processor(text=[one.render("image", "how many?")], images=[given[0]["image"]], return_tensors="pt")
    assert list(prompt) == made["input_ids"][0].tolist()
    assert prompt.column("mm_token_type_ids") == made["mm_token_type_ids"][0].tolist()
    assert encode.processor.columns == ("mm_token_type_ids",)
    assert prompt.media.keys() == {"pixel_values", "image_grid_thw"}
    assert all(torch.equal(tensor, made[name]) for name, tensor in prompt.media.items())


def test_a_response_follows_the_tokens_of_its_prompt():
    one = family("llava")
    encode = encoder(one)
    for row in rows(one):
        ids, trains = encode.example(row)
        start = trains.index(True)
        assert ids[:start] == encode.prompt(row) and all(trains[start:]) and not any(trains[:start])
        assert ids[-1] == encode.processor.tokenizer.eos_token_id
        assert (ids.media is None) == (encode.prompt(row).media is None)


def test_turns_of_a_dialogue_train_and_keep_their_media():
    one = family("qwen2_vl")
    encode = encoder(one)
    answer = {"role": "assistant", "content": "two"}
    dialogue = [*user(medium(one, 0), text("first?")), answer, *user(medium(one, 1), text("second?")), answer]
    encode._train_on = "assistant"
    ids, trains = encode.example({"prompt": dialogue[:3], "response": dialogue[3:]})
    assert ids.media["image_grid_thw"].shape == (2, 3)
    spoken = "".join(
        encode.processor.tokenizer.convert_ids_to_tokens([i for i, t in zip(ids, trains, strict=True) if t])
    )
    assert spoken.replace(encode.processor.tokenizer.eos_token, "|") == "two|two|"


UNTAKEN = {"qwen2_5_vl": "<|video_pad|>", "internvl": "<video>", "qwen2_5_omni_thinker": "<|VIDEO|>", "smolvlm": None}


@pytest.mark.parametrize(("name", "token"), UNTAKEN.items())
def test_placeholders_of_media_that_the_run_does_not_take(name, token):
    """A text may quote them, and they count as no medium. SmolVLM names one that its tokenizer lacks."""
    one = family(name)
    encode = encoder(one)
    tokenizer, processor = one.processor.tokenizer, encode.processor
    assert "video" not in processor.slots and tokenizer.unk_token_id not in processor.placeholders
    if token is None:
        assert one.processor.video_token not in tokenizer.get_vocab()
        return
    assert tokenizer.convert_tokens_to_ids(token) in processor.placeholders
    quoted, plain = (encode.prompt({"prompt": f"say {text}!"}) for text in (token, "it"))
    assert token in tokenizer.decode(quoted) and not set(quoted) & set(processor.placeholders)
    for name in processor.columns:
        assert set(quoted.column(name)) == set(plain.column(name)) == {0}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "gemma3", "qwen2_audio", "qwen2_5_omni_thinker"])
def test_a_quoted_placeholder_is_spelled(name):
    one = family(name)
    encode = encoder(one)
    kind = one.kinds[0]
    for placeholder in encode.processor.placeholders:
        quote = encode.processor.tokenizer.convert_ids_to_tokens(placeholder)
        plain = encode.prompt({"prompt": f"say {quote}!"})
        assert placeholder not in plain and plain.media is None
        assert quote in encode.processor.tokenizer.decode(plain)
        both = encode.prompt({"prompt": user(medium(one, 0), text(f"say {quote}!"))})
        alone = encode.prompt({"prompt": user(medium(one, 0), text("say !"))})
        assert both.count(placeholder) == alone.count(placeholder)
    assert one.placeholders[kind] in encode.processor.placeholders


def test_what_the_model_does_not_take_is_named():
    one = family("llava")
    encode = encoder(one)
    sound = {"type": "audio", "audio": {"array": torch.zeros(10).numpy(), "sampling_rate": 16000}}
    with pytest.raises(ValueError, match="the model takes no audio; it takes image"):
        encode.prompt({"prompt": user(sound)})
    reads_text = Encoder(encode.processor.tokenizer, "chat", None)
    with pytest.raises(ValueError, match=r"message 0 has image, and the model of this run reads text alone.*processor"):
        reads_text.prompt({"prompt": user(medium(one, 0))})
    with pytest.raises(ValueError, match=r"data\.truncation=left: a prompt with media has \d+ tokens, over .*=3"):
        limited = Encoder(
            encode.processor.tokenizer, "chat", None, limit=PromptLimit(3, "left"), processor=encode.processor
        )
        limited.prompt({"prompt": user(medium(one, 0))})
    plain = limited.prompt({"prompt": "a long question"})
    assert len(plain) == 3


def test_a_template_of_texts_gets_slots():
    one = family("qwen2_vl")
    encode = encoder(one)
    content = user(medium(one, 0), text("?"))
    without = Encoder(encode.processor.tokenizer, "none", None, processor=encode.processor)
    assert encode.processor.tokenizer.decode(without.prompt({"prompt": content})).startswith(
        "<|vision_start|><|image_pad|>"
    )
    tokenizer = encode.processor.tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    strings = Encoder(tokenizer, "chat", None, processor=encode.processor)
    prompt = strings.prompt({"prompt": content})
    assert tokenizer.decode(prompt).startswith("[user]<|vision_start|><|image_pad|>") and prompt.media is not None


def test_the_probe_has_one_medium_of_each_kind():
    for name in ("idefics3", "qwen2_audio", "gemma3"):
        facts = encoder(family(name)).media_facts
        assert facts.probe.media and set(facts.placeholders) & set(facts.probe)
    assert encoder(family("idefics3")).media_facts.stacked == {"pixel_values", "pixel_attention_mask"}
    assert encoder(family("llava")).media_facts.stacked == frozenset()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "gemma3", "qwen2_audio"])
def test_a_supervised_row_is_processed_once(name, monkeypatch):
    """The tokens, columns and media are those of the texts up to each cut, which the processor gets one by one."""
    one = family(name)
    encode = encoder(one)
    processor, calls = encode.processor, []
    quote = processor.tokenizer.convert_ids_to_tokens(processor.placeholders[0])
    row = {"prompt": user(medium(one, 0), text(f" say {quote} ")), "response": f"it {quote} is"}
    outputs = processor._outputs
    monkeypatch.setattr(processor, "_outputs", lambda text, opened: calls.append(opened) or outputs(text, opened))
    ids, trains = encode.example(row)
    assert [len(media) for opened in calls for media in opened.values()] == [1]
    monkeypatch.setattr(
        processor,
        "prefixes",
        lambda rich, cuts: [processor.encode(RichText(rich.text[:cut], rich.media)) for cut in cuts],
    )
    apart, same_trains = encode.example(row)
    assert len(calls) == 3
    assert ids == apart and trains == same_trains
    assert all(ids.column(column) == apart.column(column) for column in processor.columns)
    assert ids.media.keys() == apart.media.keys()
    assert all(torch.equal(tensor, apart.media[key]) for key, tensor in ids.media.items())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_audio"])
def test_two_calls_describe_a_processor(name, monkeypatch):
    calls, of = [], ModelProcessor._of
    monkeypatch.setattr(ModelProcessor, "_of", lambda self, rich: calls.append(rich) or of(self, rich))
    processor = encoder(family(name)).processor
    assert len(calls) == 2
    again = processor.encode(calls[0])
    assert processor.probe == again and processor.probe.media.keys() == again.media.keys()
