"""Images, audio and video are opened from files, bytes and arrays; damaged ones are named."""

import base64
import io
import random
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from rft.data.encode.media import files as media_files
from rft.data.encode.media.audio import open_audio
from rft.data.encode.media.files import (
    LARGEST,
    MOST_BYTES,
    file_of,
    lossless_url,
    open_image,
    open_video,
    read_video,
    small_file,
)
from rft.data.encode.media.normal import normalize_media, with_data_urls
from rft.data.encode.parts import media_of

GREY = 10  # a frame is brighter than that before it by this
COLORS = ((255, 0, 0), (0, 0, 255))


def encoded(picture: Image.Image, ending: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, ending, **options)
    return file.getvalue()


@pytest.fixture
def picture() -> Image.Image:
    """Two pixels side by side: red and blue."""
    made = Image.new("RGB", (2, 1))
    made.putdata(COLORS)
    return made


def pixels(value: Any) -> tuple[Any, ...]:
    opened = open_image(value)
    assert opened.mode == "RGB"
    return tuple(opened.getpixel((x, y)) for y in range(opened.height) for x in range(opened.width))


def test_every_form_of_an_image_is_the_same(picture: Image.Image, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture, "PNG"))
    forms = [str(tmp_path / "a.png"), encoded(picture, "PNG"), picture, np.asarray(picture), picture.convert("RGBA")]
    assert [pixels(form) for form in forms] == [COLORS] * 5
    assert pixels(picture.convert("P", palette=Image.Palette.ADAPTIVE)) == COLORS
    assert pixels(np.array([[0, 255]], np.uint8)) == ((0,) * 3, (255,) * 3), "grey"


def test_what_is_transparent_stands_on_white_whatever_has_the_transparency() -> None:
    """Black that cannot be seen, half of black, and black."""
    drawn = Image.fromarray(np.array([[[0, 0, 0, 0], [0, 0, 0, 128], [0, 0, 0, 255]]], np.uint8))
    expected = ((255,) * 3, (127,) * 3, (0,) * 3)
    assert pixels(drawn) == pixels(np.asarray(drawn)) == pixels(drawn.convert("LA")) == expected
    assert pixels(encoded(drawn, "PNG")) == pixels(encoded(drawn, "WEBP", lossless=True)) == expected
    palette = Image.new("P", (2, 1), 1)
    palette.putpixel((1, 0), 2)
    palette.putpalette([0] * 3 + [0] * 3 + [255, 0, 0])
    assert pixels(encoded(palette, "PNG", transparency=1)) == ((255,) * 3, COLORS[0])
    assert pixels(encoded(Image.new("RGB", (1, 1)), "PNG", transparency=(0, 0, 0))) == ((255,) * 3,)


def test_grey_of_16_bits_is_scaled() -> None:
    grey = Image.fromarray(np.array([[0, 256, 32768, 65535]], np.uint16))
    assert pixels(grey) == pixels(encoded(grey, "PNG")) == tuple((level,) * 3 for level in (0, 1, 128, 255))


def test_an_image_is_turned_as_its_metadata_say(picture: Image.Image) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    assert pixels(encoded(picture, "PNG", exif=exif)) == COLORS[::-1]


def test_damaged_images_are_named(picture: Image.Image, tmp_path: Path) -> None:
    noise = Image.effect_noise((64, 64), 80).convert("RGB")
    for ending in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        path = tmp_path / f"a.{ending}"
        whole = encoded(noise, ending)
        for data in (whole[: len(whole) // 2], whole[:20], b"", b"no image"):
            path.write_bytes(data)
            with pytest.raises(ValueError, match=rf"^.*a\.{ending} cannot be read as an image \(.*; replace it, or re"):
                open_image(str(path))
    with pytest.raises(ValueError, match=r"^a file of 8 bytes cannot be read as an image"):
        open_image(b"no image")
    with pytest.raises(ValueError, match=r"gone\.png cannot be read \("):
        open_image(str(tmp_path / "gone.png"))
    with pytest.raises(ValueError, match=r"^a value \(ndarray\) cannot be read as an image"):
        open_image(np.zeros((2, 2, 5)))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_changed_bytes_open_or_are_refused() -> None:
    """Whatever pillow raises for a damaged file is a ValueError."""
    rng = random.Random(0)
    for ending in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        whole = encoded(Image.effect_noise((16, 16), 80).convert("RGB"), ending)
        for _ in range(200):
            data = bytearray(whole)
            for _ in range(3):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                open_image(bytes(data))
            except ValueError as error:
                assert "bytes cannot be read as an image" in str(error) or "is too large" in str(error)


def header(width: int, height: int) -> bytes:
    """The beginning of a png file of that size."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\1IDAT"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_small_file_of_a_large_image_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ValueError, match=rf"\(8001 x 8000 pixels are more than {LARGEST:,}\)"):
        open_image(header(8001, 8000))
    with pytest.raises(ValueError, match=r"^a file of 41 bytes is too large \("):
        open_image(header(60_000, 60_000))


def test_without_pillow_the_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=r"^images need the package pillow: pip install pillow$"):
        open_image(b"x")


def test_small_files_of_known_formats_are_unchanged(picture: Image.Image, tmp_path: Path) -> None:
    for ending, suffix in (("PNG", "png"), ("JPEG", "jpg"), ("GIF", "gif"), ("WEBP", "webp")):
        data = encoded(picture, ending)
        assert small_file("image", data) == (data, suffix)
    for beginning, suffix in ((b"ID3", "mp3"), (b"fLaC", "flac"), (b"OggS", "ogg"), (b"RIFFxxxxWAVE", "wav")):
        assert small_file("audio", beginning) == (beginning, suffix)
    (tmp_path / "a").write_bytes(encoded(picture, "PNG"))
    assert small_file("image", str(tmp_path / "a")) == (encoded(picture, "PNG"), "png")


def test_other_media_become_files_that_a_browser_shows(picture: Image.Image, tmp_path: Path) -> None:
    for value in (encoded(picture, "BMP"), picture, np.asarray(picture)):
        data, suffix = small_file("image", value) or (b"", "")
        assert suffix == "png" and pixels(data) == COLORS
    data, suffix = small_file("audio", {"array": np.array([0.5, -1, 2], np.float32), "sampling_rate": 8000}) or (
        b"",
        "",
    )
    assert suffix == "wav" and np.allclose(open_audio(data, 8000), [0.5, -1, 1], atol=1e-4)


def test_what_is_no_medium_has_no_small_file(tmp_path: Path) -> None:
    for kind in ("image", "audio", "video"):
        for value in (None, {}, {"bytes": b"x"}, "relative.png", str(tmp_path / "none"), "https://a/b.png", 3):
            assert small_file(kind, value) is None
    assert small_file("video", str(tmp_path)) is None


def test_a_url_for_a_server_loses_nothing(picture: Image.Image) -> None:
    beginning, _, data = lossless_url(picture, 0).partition(",")
    found = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (beginning, found.format) == ("data:image/png;base64", "PNG")
    assert np.array_equal(np.asarray(found), np.asarray(picture))
    samples = np.random.default_rng(0).standard_normal(101).astype(np.float32)
    beginning, _, data = lossless_url(samples, 16000).partition(",")
    file = base64.b64decode(data)
    assert beginning == "data:audio/wav;base64" and struct.unpack("<I", file[4:8]) == (len(file) - 8,)
    assert struct.unpack("<HHIIHH", file[20:36]) == (3, 1, 16000, 64000, 4, 32), "floating-point numbers, one channel"
    assert struct.unpack("<I", file[40:44]) == (404,)
    assert np.array_equal(np.frombuffer(file[44:], "<f4"), samples)


def movie(count: int = 6, rate: int = 2, size: tuple[int, int] = (32, 16), form: str = "mp4") -> bytes:
    """A file whose frames of one color become brighter."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream("mpeg4" if form == "mp4" else "libvpx", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(count):
            picture = np.full((size[1], size[0], 3), GREY * number % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def every(metadata: dict[str, Any]) -> range:
    return range(metadata["total_num_frames"])


@pytest.mark.parametrize("form", ["mp4", "webm"])
def test_the_chosen_frames_of_a_file_are_decoded(form: str, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def choose(metadata: dict[str, Any]) -> list[int]:
        seen.append(metadata)
        return [0, 3, 3, 5]

    (tmp_path / "a.mp4").write_bytes(data := movie(form=form))
    for value in (data, str(tmp_path / "a.mp4")):
        opened = open_video(value, choose)
        assert opened.frames.shape == (4, 16, 32, 3) and opened.frames.dtype == np.uint8
        assert np.abs(opened.frames.mean((1, 2, 3)) - [0, 30, 30, 50]).max() < 4
        assert opened.metadata == seen[-1] | {"frames_indices": [0, 3, 3, 5]}
    facts = {"total_num_frames": 6, "fps": 2.0, "duration": 3.0, "width": 32, "height": 16}
    assert seen == [facts, facts]


def test_an_array_and_images_are_taken_whole(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 3), dtype=np.uint8)
    Image.fromarray(frames[2]).save(tmp_path / "2.png")
    for value in (frames, [frames[0], Image.fromarray(frames[1]), str(tmp_path / "2.png")]):
        opened = open_video(value, every)
        assert np.array_equal(opened.frames, frames)
        assert opened.metadata == {"total_num_frames": 3, "height": 4, "width": 6, "frames_indices": [0, 1, 2]}
    with pytest.raises(ValueError, match=r"^an array \(3, 4, 6, 3\) of float64 is no video; give \(frames, H, W, 3\)"):
        open_video(frames.astype(float), every)
    with pytest.raises(ValueError, match=r"^the frames of a video have the shapes \[\(3, 6, 3\), \(4, 6, 3\)\]; scale"):
        open_video([frames[0], frames[0][:3]], every)


def test_damaged_videos_are_named(tmp_path: Path) -> None:
    whole = movie()
    for data in (whole[: len(whole) // 2], whole[:20], b"", b"no video", b"#EXTM3U\n#EXTINF:1,\nfile:///a.mp4\n"):
        (tmp_path / "a.mp4").write_bytes(data)
        with pytest.raises(ValueError, match=r"^.*a\.mp4 cannot be read as a video \(.*\); replace it, or remove the"):
            open_video(str(tmp_path / "a.mp4"), every)
    with pytest.raises(ValueError, match=r"gone\.mp4 cannot be read as a video \(.*No such file"):
        open_video(str(tmp_path / "gone.mp4"), every)
    rng = np.random.default_rng(0)
    for _ in range(60):  # other bytes open or are refused
        damaged = np.frombuffer(whole, np.uint8).copy()
        damaged[rng.integers(len(damaged), size=8)] = rng.integers(256, size=8)
        try:
            open_video(damaged.tobytes(), every)
        except ValueError as error:
            assert "cannot be read as a video" in str(error)


def test_a_video_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    data = movie()
    count = MOST_BYTES // (16 * 32 * 3) + 1
    with pytest.raises(ValueError, match=rf"{count:,} chosen frames of 32 x 16 pixels are .* by actor\.processor\.vid"):
        read_video(data, "a", lambda metadata: range(count))
    with pytest.raises(ValueError, match=r"^a cannot be read as a video \(frame 6 is chosen of 6\)"):
        read_video(data, "a", lambda metadata: [5, 6])
    monkeypatch.setattr(media_files, "MOST_FRAMES", 5)
    with pytest.raises(ValueError, match=r"^a cannot be read as a video \(it has more than 5 frames\)"):
        read_video(data, "a", every)
    monkeypatch.setattr(media_files, "LARGEST", 511)
    with pytest.raises(ValueError, match=r"frames of 32 x 16 pixels are none, or more than 511"):
        read_video(data, "a", every)


def test_without_av_the_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"^videos need the package av: pip install av$"):
        read_video(b"x", "a", every)


def test_a_video_for_people_is_the_file_or_its_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    for form in ("mp4", "webm"):
        assert small_file("video", data := movie(form=form)) == (data, form) == file_of("video", data)
    frames = np.full((2, 4, 6, 3), 7, np.uint8)
    for value in (frames, list(frames)):
        drawn = small_file("video", value)
        assert drawn is not None and drawn[1] == "png" and Image.open(io.BytesIO(drawn[0])).getpixel((5, 3)) == (7,) * 3
    monkeypatch.setattr("rft.data.encode.media.files.SMALL", 100)
    drawn = small_file("video", movie())
    assert drawn is not None and drawn[1] in ("png", "jpg")
    with pytest.raises(ValueError, match=r"is no mp4 or webm file, and other videos are not converted"):
        file_of("video", frames)


def test_rows_with_video_of_other_libraries_have_the_normal_form(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(data := movie())
    (tmp_path / "0.png").write_bytes(b"x")
    path = str(tmp_path / "a.mp4")
    verl = [{"type": "video", "video": "a.mp4"}, ["0.png", b"y"], {"bytes": data, "path": None}]
    for column in ("videos", "video"):
        found = normalize_media({"prompt": "<video> <video> <video>", column: verl}, tmp_path)
        assert media_of(found["prompt"]) == [
            ("video", path), ("video", [str(tmp_path / "0.png"), b"y"]), ("video", data)
        ]  # fmt: skip
    with pytest.raises(ValueError, match=r"a value with the keys type, video, fps is no video: give .* list of images"):
        normalize_media({"prompt": "<video>", "videos": [{"type": "video", "video": "a.mp4", "fps": 1}]}, tmp_path)
    frames = np.full((2, 4, 6, 3), 7, np.uint8)
    again = with_data_urls(normalize_media({"prompt": "<video>", "videos": [frames]}, None))
    [(_, opened)] = media_of(normalize_media(again, None)["prompt"])
    assert np.array_equal(open_video(opened, every).frames, frames)
