"""Processors that a config names: of a folder, and those of the built-in tasks."""

import pytest

from rft.data.encode.encoder import Encoder
from rft.data.encode.processors import mel_frames, patches, pretrained
from rft.data.encode.tokenizer import characters, characters_and_tokens
from tests.families import family, sound
from tests.families.rows import encoder, rows

VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
AUDIO = ["<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz ?"


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "qwen2_audio"])
def test_a_saved_processor_encodes_as_before(name, tmp_path):
    one = family(name)
    before = encoder(one)
    before.media_facts.save(tmp_path)
    tokenizer = type(before.processor.tokenizer).from_pretrained(tmp_path)
    after = Encoder(tokenizer, "chat", None, processor=pretrained(tokenizer=tokenizer, path=str(tmp_path)))
    for row in rows(one):
        old, new = before.prompt(row), after.prompt(row)
        assert old == new and old.columns == new.columns
        assert (old.media is None) == (new.media is None)
        for key, tensor in (old.media or {}).items():
            assert tensor.equal(new.media[key])


def test_a_folder_without_a_processor_is_named(tmp_path):
    tokenizer = characters(alphabet=LETTERS)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=str(tmp_path)):
        pretrained(tokenizer=tokenizer, path=str(tmp_path))


def test_a_token_of_an_image_stands_for_merged_patches():
    image = pytest.importorskip("PIL.Image").new("RGB", (32, 16))
    tokenizer = characters_and_tokens(alphabet=LETTERS, special=VISION)
    assert tokenizer.convert_tokens_to_ids(VISION) == [3, 4, 5, 6]
    made = patches(tokenizer=tokenizer, patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "how many?"}]
    prompt = Encoder(tokenizer, "none", None, processor=made).prompt({"prompt": [{"role": "user", "content": content}]})
    assert prompt.count(5) == (32 // 8) * (16 // 8) and prompt[:2] == [3, 5]


def test_a_token_of_a_sound_stands_for_four_frames():
    tokenizer = characters_and_tokens(alphabet=LETTERS, special=AUDIO)
    made = mel_frames(tokenizer=tokenizer, mel_bins=8, seconds=1, sampling_rate=16000)
    content = [{"type": "audio", "audio": {"array": sound(0, 6400), "sampling_rate": 16000}}]
    prompt = Encoder(tokenizer, "none", None, processor=made).prompt({"prompt": [{"role": "user", "content": content}]})
    assert prompt.count(5) == 10  # 0.4 s are 40 frames of 10 ms
