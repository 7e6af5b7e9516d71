"""Media as bytes of files: what is written is read again, and what a server gets is the file itself."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest

from rft.data.encode.media_files import file_of, open_audio, open_media
from rft.data.encode.parts import media_of
from rft.data.encode.saved_media import openai_messages, write_rows
from rft.data.rows.sources import FileRows
from tests.families import picture, sound


def image_file(form):
    picture(3).save(file := io.BytesIO(), form)
    return file.getvalue()


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def test_written_rows_are_read_again_with_the_same_media(tmp_path):
    tone = {"array": np.round(sound(1) * 2**10).clip(-(2**15), 2**15 - 1) / np.float32(2**15), "sampling_rate": 16000}
    image, jpeg = picture(0), image_file("jpeg")
    rows = [
        {"prompt": user({"type": "image", "image": image}, {"type": "text", "text": "é?"}), "answer": "1"},
        {"prompt": "no media", "answer": "2"},
        {"prompt": user({"type": "image", "image": jpeg}, {"type": "audio", "audio": tone}), "answer": "3"},
        {"prompt": [{"role": "system", "content": "s"}, *user({"type": "text", "text": "only text"})], "answer": "4"},
    ]
    path = tmp_path / "made" / "train.jsonl"
    assert write_rows(iter(rows), path) == 4
    assert sorted(file.name for file in (path.parent / "train").iterdir()) == ["1-0.png", "3-0.jpg", "3-1.wav"]
    found = FileRows(str(path), {}, None, None, "rows").load(["prompt", "answer"])
    assert [row["answer"] for row in found] == ["1", "2", "3", "4"] and found[1]["prompt"] == "no media"
    assert found[0]["prompt"][0]["content"][1] == {"type": "text", "text": "é?"} and found[3] == rows[3]
    [(_, first)], [(_, second), (_, third)] = (media_of(found[row]["prompt"]) for row in (0, 2))
    assert np.array_equal(open_media("image", first), image)
    assert Path(second).read_bytes() == jpeg
    assert np.array_equal(open_audio(third, 16000), tone["array"])
    assert write_rows([], tmp_path / "empty.jsonl") == 0


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_a_file_is_sent_as_it_is(form, tmp_path):
    (tmp_path / "file").write_bytes(data := image_file(form))
    for value in (data, str(tmp_path / "file")):
        [message] = openai_messages(user({"type": "image", "image": value}, {"type": "text", "text": "?"}))
        head, _, text = message["content"][0]["image_url"]["url"].partition(",")
        assert head == f"data:image/{form};base64" and base64.b64decode(text) == data
        assert message["content"][1] == {"type": "text", "text": "?"}
    assert json.dumps(message)


def test_sounds_are_sent_with_their_format_and_texts_stay():
    tone = {"array": sound(0).clip(-1, 1), "sampling_rate": 8000}
    [message] = openai_messages(user({"type": "audio", "audio": tone}))
    part = message["content"][0]["input_audio"]
    assert part["format"] == "wav"
    heard = open_audio(base64.b64decode(part["data"]), 8000)
    assert np.abs(heard - tone["array"]).max() <= 2**-15
    heads = {b"RIFF....WAVE": "wav", b"fLaC": "flac", b"OggS": "ogg", b"ID3": "mp3"}
    assert {head: file_of("audio", head + b"rest") for head in heads} == {
        head: (head + b"rest", suffix) for head, suffix in heads.items()
    }
    assert openai_messages([{"role": "user", "content": "a"}]) == [{"role": "user", "content": "a"}]


def test_what_cannot_be_sent_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a file of 5 bytes cannot be read as an image"):
        openai_messages(user({"type": "image", "image": b"wrong"}))
    with pytest.raises(ValueError, match=r"missing\.png cannot be read"):
        openai_messages(user({"type": "image", "image": str(tmp_path / "missing.png")}))
    with pytest.raises(ValueError, match="video is not sent to servers"):
        openai_messages(user({"type": "video", "video": b"1"}))
