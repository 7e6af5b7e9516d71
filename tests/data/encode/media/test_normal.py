"""Rows with media in the formats of other projects, in the normal form: parts with values."""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from rft.data.encode.media.audio import open_audio
from rft.data.encode.media.files import open_image
from rft.data.encode.media.normal import normalize_media, undecoded, with_data_urls
from rft.data.encode.parts import has_parts, media_of, text_of
from tests.data.media_parts import BLUE, RED, image, text, user

URL = f"data:image/png;base64,{base64.b64encode(RED).decode()}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "media").mkdir()
    for name, data in (("a b.png", RED), ("b.png", BLUE), ("c.wav", b"RIFF")):
        (tmp_path / "media" / name).write_bytes(data)
    return tmp_path


def prompt_of(row: dict[str, Any], folder: Path | None = None) -> Any:
    found = normalize_media(row, folder)
    assert not found.keys() & {"image", "images", "audio", "audios", "video", "videos"}
    return found["prompt"]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, ("image", RED)),
        ({"type": "image_url", "image_url": URL}, ("image", RED)),
        ({"type": "audio_url", "audio_url": {"url": "data:;base64,UklG"}}, ("audio", b"RIF")),
        ({"type": "input_audio", "input_audio": {"data": "UklG\nUklG", "format": "wav"}}, ("audio", b"RIFRIF")),
        ({"type": "image", "image": RED, "text": None}, ("image", RED)),
        ({"type": "image", "image": {"bytes": RED, "path": "elsewhere.png"}}, ("image", RED)),
        ({"type": "image", "base64": base64.b64encode(RED).decode()}, ("image", RED)),
        ({"type": "image", "url": URL}, ("image", RED)),
        ({"type": "video", "video": b"mp4"}, ("video", b"mp4")),
    ],
)
def test_a_part_of_each_format(part: dict[str, Any], expected: tuple[str, bytes]) -> None:
    row = {"prompt": [user([text("a"), part])], "response": [{"role": "assistant", "content": [part]}]}
    found = normalize_media(row, None)
    assert media_of(found["prompt"]) == media_of(found["response"]) == [expected]
    kind, value = expected
    assert found["prompt"] == [user([text("a"), {"type": kind, kind: value}])]
    assert normalize_media(found, None) == found, "the normal form of the normal form is itself"


@pytest.mark.parametrize(
    "value",
    [
        "media/a b.png",
        "./media/../media/a b.png",
        {"path": "media/a b.png", "bytes": None},
        {"path": "media/a b.png", "bytes": b""},
        Path("media/a b.png"),
    ],
)
def test_a_relative_path_begins_at_the_folder(value: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(folder / "media" / "a b.png")
    assert media_of(prompt_of({"prompt": "?", "image": value}, folder)) == [("image", path)]
    monkeypatch.chdir(folder.parent)
    assert media_of(prompt_of({"prompt": "?", "image": value}, Path(folder.name))) == [("image", path)]
    with pytest.raises(ValueError, match=r"^the field 'image': 'm?.*a b\.png' is a relative path.*; give an absolute"):
        normalize_media({"prompt": "?", "image": value}, None)


def test_absolute_paths_and_urls_of_files(folder: Path) -> None:
    path = str(folder / "media" / "a b.png")
    for value in (path, f"file://{path}", f"file://{path.replace(' ', '%20')}"):
        assert media_of(prompt_of({"prompt": "?", "image": value})) == [("image", path)]


def test_values_of_python_stay_what_they_are() -> None:
    picture, pixels = Image.new("RGB", (2, 2)), np.zeros((2, 2, 3), np.uint8)
    (_, first), (_, second) = media_of(prompt_of({"prompt": "<image><image>", "images": [picture, pixels]}))
    assert first is picture and second is pixels
    [(kind, tone)] = media_of(prompt_of({"prompt": "?", "audio": {"array": [0.5, -0.5], "sampling_rate": 8000}}))
    assert kind == "audio" and tone["sampling_rate"] == 8000
    assert tone["array"].dtype == np.float32 and tone["array"].tolist() == [0.5, -0.5]


def test_markers_are_replaced_in_their_order() -> None:
    """verl's rows: several media in a message, and in several messages."""
    row = {
        "prompt": [user("<image>Find <image>x"), {"role": "assistant", "content": "1"}, user("and<image>")],
        "images": [{"bytes": RED}, {"bytes": BLUE}, {"bytes": RED}],
        "answer": "<image>",
    }
    assert normalize_media(row, None) == {
        "prompt": [
            user([image(RED), text("Find "), image(BLUE), text("x")]),
            {"role": "assistant", "content": "1"},
            user([text("and"), image(RED)]),
        ],
        "answer": "<image>",
    }


def test_kinds_are_placed_independently() -> None:
    row = {"prompt": "<video>then<image>and<audio>", "image": RED, "videos": [b"v"], "audios": [{"bytes": b"a"}]}
    assert media_of(prompt_of(row)) == [("video", b"v"), ("image", RED), ("audio", b"a")]
    assert media_of(prompt_of(row | {"prompt": "all"})) == [("image", RED), ("audio", b"a"), ("video", b"v")]


def test_parts_without_a_value_are_filled_and_then_markers_are_text() -> None:
    asked = user([text("the marker <image>"), {"type": "image", "text": None}, {"type": "image"}])
    found = prompt_of({"prompt": [user("<image>"), asked], "images": [RED, BLUE]})
    assert found == [user("<image>"), user([text("the marker <image>"), image(RED), image(BLUE)])]


def test_media_without_places_stand_before_the_first_question() -> None:
    system = {"role": "system", "content": "s"}
    found = prompt_of({"prompt": [system, user("a"), user("b")], "images": [RED, BLUE]})
    assert found == [system, user([image(RED), image(BLUE), text("a")]), user("b")]
    assert prompt_of({"prompt": "a", "images": [RED]}) == [user([image(RED), text("a")])]
    assert prompt_of({"prompt": [user([text("a")])], "images": [RED]}) == [user([image(RED), text("a")])]


@pytest.mark.parametrize("empty", [{}, {"images": []}, {"image": None}, {"image": {}}, {"image": ""}])
def test_a_marker_in_a_row_without_media_is_text(empty: dict[str, Any]) -> None:
    row = {"prompt": "<image> is a tag", "response": "yes", "chosen": [user("<image>")], "n": 3}
    assert normalize_media(row | empty, None) == row


def test_the_messages_of_a_dialogue_are_filled_with_its_prompt() -> None:
    dialogue = [user("<image>a"), {"role": "assistant", "content": "<image>?"}]
    found = normalize_media(
        {"messages": dialogue, "prompt": dialogue[:-1], "response": dialogue[1:], "images": [RED]}, None
    )
    asked = user([image(RED), text("a")])
    assert found == {"messages": [asked, dialogue[1]], "prompt": [asked], "response": dialogue[1:]}
    assert normalize_media({"messages": dialogue[:1], "images": [RED]}, None) == {"messages": [asked]}


def test_the_prompt_may_have_another_name() -> None:
    found = normalize_media({"question": "<image>?", "prompt": "<image>", "image": RED}, None, "question")
    assert found == {"question": [user([image(RED), text("?")])], "prompt": "<image>"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image><image>", "images": [RED]}, "'images': it has 1 media, and the field 'prompt' has 2 pl"),
        ({"prompt": [user("<image>")], "images": [RED] * 3}, "'images': it has 3 media, .* 'prompt' has 1 places"),
        ({"prompt": [user([{"type": "image"}])], "images": [RED, RED]}, "'images': it has 2 media, .* has 1 places"),
        ({"prompt": [user([{"type": "image"}])]}, "'prompt': .* part of type 'image' has no value, and .* no field im"),
        ({"prompt": [user([image(RED)])], "images": [RED]}, "'images': the field 'prompt' has content parts of this"),
        ({"prompt": "a", "images": [RED], "image": RED}, "'image' and 'images' are of the same kind; keep one"),
        (
            {"prompt": [{"role": "system", "content": "a"}], "image": RED},
            "'image': .* neither <image> nor a message of",
        ),
        (
            {"prompt": "a", "image": "http://a.b/c.png"},
            "'image': 'http://a.b/c.png' is not a local file.*download it fi",
        ),
        (
            {"prompt": [user([{"type": "image", "url": "hf://a/c.png"}])]},
            "'prompt': 'hf://a/c.png' is not a local file",
        ),
        (
            {"prompt": "a", "image": "/no/such.png"},
            "'image': there is no file /no/such.png; correct the path '/no/such.png'",
        ),
        ({"prompt": "a", "image": "/9j/" * 9000}, "'image': there is no file /9j/.{0,1200}$"),
        ({"prompt": "a", "images": [RED, None]}, "'images': None is no image: give a path"),
        ({"prompt": "a", "image": 5}, "'image': 5 is no image: give a path"),
        (
            {"prompt": "a", "image": {"image": "a.png", "fps": 2}},
            "'image': a value with the keys image, fps is no image",
        ),
        ({"prompt": "a", "image": "data:image/png,x"}, "'image': .* is a data: URL without base64"),
        ({"prompt": "a", "image": "data:;base64,x"}, r"'image': 'x' is not base64 \("),
        ({"prompt": "a", "image": "data:;base64,"}, "'image': '' is not base64 of one byte"),
        ({"prompt": "a", "audio": np.zeros(3)}, r"'audio': array.* is no audio: .* or {array, sampling_rate}"),
        ({"prompt": "a", "audio": {"array": [[0.0]], "sampling_rate": 1}}, r"'audio': .* the shape \(1, 1\)"),
        ({"prompt": [user([image(RED) | {"max_pixels": 5}])]}, "'prompt': .* has the keys image, max_pixels; give"),
        ({"prompt": "a", "response": [user([{"type": "input_audio"}])]}, "'response': .* 'input_audio' has no value"),
    ],
)
def test_what_has_no_place_or_no_value_names_the_field(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^the fields? {message}"):
        normalize_media(row, None)


def test_media_need_a_prompt() -> None:
    for prompt in ({}, {"prompt": None}, {"prompt": 3}, {"text": "a"}):
        with pytest.raises(ValueError, match=r"^'images': the row has no prompt for the media, a text or"):
            normalize_media({"images": [RED], **prompt}, None)


def test_what_is_no_part_of_media_is_left_to_the_check_of_messages() -> None:
    for content in ([5], [{"type": "image_table", "x": 1}], [{"type": ["image"]}], {"sum": 5}, None):
        row = {"prompt": [user(content)]}
        assert normalize_media(row, None) == row


def test_has_parts() -> None:
    assert has_parts([user("a"), user([text("a"), image(RED)])])
    for value in ("<image>", None, [], [user("a")], [user([text("a")])], [{"role": "assistant", "tool_calls": []}]):
        assert not has_parts(value) and media_of(value) == []


def test_the_text_of_a_content() -> None:
    assert text_of([text("a"), image(RED), text("b")]) == "ab" and text_of("a") == "a"


def test_bytes_survive_a_file_of_json(folder: Path) -> None:
    path = str(folder / "media" / "b.png")
    prompt = [user([image(RED), text("a"), image(path)]), {"role": "assistant", "content": None}, user("b")]
    written = json.loads(json.dumps(with_data_urls({"prompt": prompt})))
    assert written["prompt"][0]["content"][1:] == prompt[0]["content"][1:]
    assert normalize_media(written, None)["prompt"] == prompt
    plain = {"prompt": "a", "raw": b"x", "answer": {"type": "image", "image": b"x"}, "list": [{"a": 1}, 2]}
    assert with_data_urls(plain) == plain


def test_what_is_in_memory_survives_a_file_of_json() -> None:
    samples = np.array([0, 0.5, -0.5], np.float32)
    parts = [image(Image.new("RGB", (3, 2), "red")), image(np.full((2, 2, 3), 7, np.uint8))]
    parts.append({"type": "audio", "audio": {"array": samples, "sampling_rate": 16000}})
    written = json.loads(json.dumps(with_data_urls({"prompt": [user(parts)]})))
    media = [value for _, value in media_of(normalize_media(written, None)["prompt"])]
    assert open_image(media[0]).size == (3, 2)
    assert open_image(media[1]).getpixel((1, 1)) == (7, 7, 7)
    assert np.allclose(open_audio(media[2], 16000), samples, atol=1e-4)


def test_values_of_another_form_are_unchanged() -> None:
    """Fields that `normalize_media` does not read may have what they like."""
    parts = [image({"bytes": b"x"}), {"type": "image"}, {"type": "audio", "audio": None}, image("rel.png"), "a"]
    row = {"of the user": [user(parts), user(None), {}]}
    assert with_data_urls(row) == row


def test_features_of_media_are_not_decoded_and_others_are() -> None:
    kinds = (datasets.Image(), datasets.Audio(), datasets.Video())
    features = datasets.Features(
        {
            "images": datasets.List(kinds[0]),
            "audio": kinds[1],
            "messages": datasets.List({"role": datasets.Value("string"), "content": {"video": kinds[2]}}),
            "label": datasets.ClassLabel(names=["a", "b"]),
        }
    )
    found = undecoded(features)
    inner = (found["images"].feature, found["audio"], found["messages"].feature["content"]["video"])
    assert [feature.decode for feature in inner] == [False] * 3
    assert found["label"] == features["label"] and found["messages"].feature["role"] == datasets.Value("string")
    assert all(kind.decode for kind in kinds), "the given features are unchanged"
    row = {"images": [{"bytes": RED, "path": None}], "audio": None, "messages": [], "label": 1}
    assert found.decode_example(row) == row


def test_text_needs_no_package_of_media() -> None:
    code = (
        "import sys; from rft.data.encode.media.normal import normalize_media; import rft.data.encode.media.files; "
        "normalize_media({'prompt': 'a', 'image': b'x'}, None); "
        "sys.exit(any(name.split('.')[0] in ('PIL', 'soundfile', 'soxr') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
