"""Media of rows become small files, each once; what is written is read again, and a server gets the file itself."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rft.data.encode.media.audio import open_audio
from rft.data.encode.media.files import file_of, open_image, whole_file
from rft.data.encode.media.folder import name_media, openai_messages, store_media, write_rows
from rft.data.encode.media.normal import normalize_media
from rft.data.encode.parts import media_of
from rft.data.rows.sources import FileRows
from rft.logger.media import media_files
from tests.data.media_parts import BLUE, RED, image, png, text, user
from tests.families import picture, sound


def test_each_medium_is_one_file_however_many_rows_have_it(tmp_path: Path) -> None:
    lines = tmp_path / "trajectories"
    (tmp_path / "a.png").write_bytes(RED)
    url = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
    forms = [RED, str(tmp_path / "a.png"), url]
    rows = [{"prompt": [user([image(form), text("?")])], "response": "x"} for form in [*forms, BLUE]]
    stored = [store_media(row, tmp_path, lines) for row in rows]
    assert len(list((tmp_path / "media").iterdir())) == 2
    assert stored[0] == stored[1] == stored[2] != stored[3]
    name = stored[0]["prompt"][0]["content"][0]["image"]
    assert name.startswith("../media/") and name.endswith(".png")
    assert (lines / name).resolve().read_bytes() == RED
    read = normalize_media(json.loads(json.dumps(stored[0])), lines)
    assert Path(media_of(read["prompt"])[0][1]).read_bytes() == RED, "the readers of rows read the lines"
    [file] = media_files(stored[0], tmp_path)
    assert file.path == tmp_path / "media" / Path(name).name


def test_a_row_has_what_json_can_hold_and_text_is_unchanged(tmp_path: Path) -> None:
    row = {"prompt": [user("a")], "response": "<image>", "score": 0.5, "steps": [1, None], "x": {"type": "image"}}
    assert store_media(row, tmp_path, tmp_path) == row
    given = {"prompt": "a", "picture": Image.new("RGB", (2, 2)), "raw": b"x", "sound": {"array": np.zeros(3)}}
    found = store_media(given, tmp_path, tmp_path)
    assert found == {"prompt": "a", "picture": "<Image>", "raw": "<bytes>", "sound": {"array": "<ndarray>"}}
    assert not list(tmp_path.iterdir())


def test_media_of_other_fields_and_other_forms_are_no_error(tmp_path: Path) -> None:
    parts: list[Any] = [image("no file"), image(str(tmp_path / "none.png")), {"type": "video", "video": "a.mp4"}]
    assert store_media({"prompt": [user(parts)]}, tmp_path, tmp_path)["prompt"][0]["content"] == parts
    assert not (tmp_path / "media").exists()
    with pytest.raises(ValueError, match="a file of 3 bytes cannot be read as an image"):
        store_media({"chosen": [user([image(b"bad")])]}, tmp_path, tmp_path)


def test_large_media_are_small_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 255, (1500, 1200, 3), np.uint8)
    sound = {"array": np.zeros(2_000_000, np.float32), "sampling_rate": 16000}
    row = {"prompt": [user([image(picture), {"type": "audio", "audio": sound}])]}
    files = list(media_files(store_media(row, tmp_path, tmp_path), tmp_path))
    assert [file.mime for file in files] == ["image/jpeg", "audio/wav"]
    assert all(file.path.stat().st_size <= 2**20 + 44 for file in files)
    assert open_image(str(files[0].path)).size == (819, 1024)


def test_whole_files_are_not_changed(tmp_path: Path) -> None:
    large = png("red", 1200)
    row = {"prompt": [user([image(large), image(b"unknown"), image("/a.png")])]}
    parts = store_media(row, tmp_path, tmp_path, whole_file)["prompt"][0]["content"]
    assert [(tmp_path / part["image"]).read_bytes() for part in parts[:2]] == [large, b"unknown"]
    assert [part["image"].rpartition(".")[2] for part in parts] == ["png", "bin", "png"]
    assert parts[2] == image("/a.png")


def test_equal_media_have_equal_names(tmp_path: Path) -> None:
    given = {"prompt": [user([image(Image.new("RGB", (2, 2), "red")), text("?")])]}
    stored = store_media(given, tmp_path, tmp_path)
    assert name_media(given) == name_media(normalize_media(stored, tmp_path))
    assert name_media(given) != name_media({"prompt": [user([image(BLUE), text("?")])]})


def image_file(form):
    picture(3).save(file := io.BytesIO(), form)
    return file.getvalue()


def asked(*parts):
    return [user(list(parts))]


def test_written_rows_are_read_again_with_the_same_media(tmp_path):
    tone = {"array": np.round(sound(1) * 2**10).clip(-(2**15), 2**15 - 1) / np.float32(2**15), "sampling_rate": 16000}
    image, jpeg = picture(0), image_file("jpeg")
    rows = [
        {"prompt": asked({"type": "image", "image": image}, {"type": "text", "text": "é?"}), "answer": "1"},
        {"prompt": "no media", "answer": "2"},
        {"prompt": asked({"type": "image", "image": jpeg}, {"type": "audio", "audio": tone}), "answer": "3"},
        {"prompt": [{"role": "system", "content": "s"}, *asked({"type": "text", "text": "only text"})], "answer": "4"},
    ]
    path = tmp_path / "made" / "train.jsonl"
    assert write_rows(iter(rows), ["prompt", "answer"], path) == 4
    assert sorted(file.name for file in (path.parent / "train").iterdir()) == ["1-0.png", "3-0.jpg", "3-1.wav"]
    found = FileRows(str(path), {}, None, None, "rows").load(["prompt", "answer"])
    assert [row["answer"] for row in found] == ["1", "2", "3", "4"] and found[1]["prompt"] == "no media"
    assert found[0]["prompt"][0]["content"][1] == {"type": "text", "text": "é?"} and found[3] == rows[3]
    [(_, first)], [(_, second), (_, third)] = (media_of(found[row]["prompt"]) for row in (0, 2))
    assert np.array_equal(open_image(first), image)
    assert Path(second).read_bytes() == jpeg
    assert np.array_equal(open_audio(third, 16000), tone["array"])
    assert write_rows([], ["prompt"], tmp_path / "empty.jsonl") == 0


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_a_file_is_sent_as_it_is(form, tmp_path):
    (tmp_path / "file").write_bytes(data := image_file(form))
    for value in (data, str(tmp_path / "file")):
        [message] = openai_messages(asked({"type": "image", "image": value}, {"type": "text", "text": "?"}))
        head, _, text = message["content"][0]["image_url"]["url"].partition(",")
        assert head == f"data:image/{form};base64" and base64.b64decode(text) == data
        assert message["content"][1] == {"type": "text", "text": "?"}
    assert json.dumps(message)


def test_sounds_are_sent_with_their_format_and_texts_stay():
    tone = {"array": sound(0).clip(-1, 1), "sampling_rate": 8000}
    [message] = openai_messages(asked({"type": "audio", "audio": tone}))
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
        openai_messages(asked({"type": "image", "image": b"wrong"}))
    with pytest.raises(ValueError, match=r"missing\.png cannot be read"):
        openai_messages(asked({"type": "image", "image": str(tmp_path / "missing.png")}))
    with pytest.raises(ValueError, match="video is not sent to servers"):
        openai_messages(asked({"type": "video", "video": b"1"}))
