"""Images and audio are opened from files, bytes and arrays; damaged ones are named."""

import base64
import io
import random
import struct
import sys
import types
import wave
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rft.data.encode.media_files import LARGEST, lossless_url, open_audio, open_image, small_file

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


def wav(frames: list[list[int]], width: int, rate: int = 8000) -> bytes:
    """A file with rows of one sample for each channel."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(len(frames[0]))
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(b"".join(n.to_bytes(width, "little", signed=width > 1) for row in frames for n in row))
    return file.getvalue()


@pytest.mark.parametrize(
    ("width", "frames", "expected"),
    [
        (1, [[128], [0], [255], [192]], [0.0, -1.0, 127 / 128, 0.5]),
        (2, [[0], [-(2**15)], [2**15 - 1], [2**14]], [0.0, -1.0, 1 - 2**-15, 0.5]),
        (3, [[0], [-(2**23)], [2**23 - 1], [2**22]], [0.0, -1.0, 1 - 2**-23, 0.5]),
        (4, [[0], [-(2**31)], [2**30], [-(2**29)]], [0.0, -1.0, 0.5, -0.25]),
        (2, [[2**14, 0], [-(2**14), 2**14]], [0.25, 0.0]),
    ],
)
def test_wav_files_of_integers(width: int, frames: list[list[int]], expected: list[float], tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav(frames, width))
    for value in (wav(frames, width), str(tmp_path / "a.wav")):
        found = open_audio(value, 8000)
        assert found.dtype == np.float32 and found.tolist() == expected


def test_an_array_is_taken_at_its_rate() -> None:
    tone = np.array([0.5, -0.5], np.float32)
    assert open_audio({"array": tone, "sampling_rate": 8000}, 8000) is tone
    for wrong in (np.zeros(0, np.float32), np.array([np.nan], np.float32)):
        with pytest.raises(ValueError, match=r"^a value \(dict\) has no samples, or one that is not finite"):
            open_audio({"array": wrong, "sampling_rate": 8000}, 8000)


def test_damaged_audio_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    path, whole = tmp_path / "a.wav", wav([[n] for n in range(100)], 2)
    for data, message in (
        (whole[:-2], "ends before its 100 samples; replace it"),
        (whole[:20], r"is not a wav file of integers \(.*pip install soundfile"),
        (b"", "is not a wav file of integers"),
        (b"ID3 some mp3", "is not a wav file of integers"),
        (wav([[0]], 2)[:-2].replace(b"data\x02", b"data\x00"), "has no samples"),
        (whole[:34] + struct.pack("<H", 64) + whole[36:], r"is not a wav file of integers \(samples of 64 bits\)"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"^.*a\.wav {message}"):
            open_audio(str(path), 8000)
    rng = random.Random(0)
    for _ in range(300):
        changed = bytearray(whole)
        changed[rng.randrange(44)] = rng.randrange(256)
        try:
            open_audio(bytes(changed), 8000)
        except ValueError as error:
            assert str(error).startswith("a file of 244 bytes ")


def test_other_formats_are_read_by_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    class LibsndfileError(RuntimeError):
        error_string = "no"

    def read(file: io.BytesIO, dtype: str, always_2d: bool) -> tuple[np.ndarray, int]:
        assert dtype == "float32" and always_2d
        if file.read() == b"bad":
            raise LibsndfileError
        return np.array([[1.0, 0.0], [0.5, 0.5]], np.float32), 8000

    fake = types.SimpleNamespace(read=read, LibsndfileError=LibsndfileError)
    monkeypatch.setitem(sys.modules, "soundfile", fake)  # type: ignore[arg-type]
    assert open_audio(b"flac", 8000).tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"^a file of 3 bytes cannot be read as audio \(no\); replace it"):
        open_audio(b"bad", 8000)


def test_another_rate_is_resampled_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = wav([[2**14], [0]], 2, rate=8000)
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(ValueError, match=r"has 8000 samples per second, and the model reads 16000; .*pip install soxr"):
        open_audio(data, 16000)

    def resample(samples: np.ndarray, rate: int, new: int) -> np.ndarray:
        return np.repeat(samples, new // rate).astype(np.float64)

    monkeypatch.setitem(sys.modules, "soxr", types.SimpleNamespace(resample=resample))  # type: ignore[arg-type]
    found = open_audio(data, 16000)
    assert found.dtype == np.float32 and found.tolist() == [0.5, 0.5, 0.0, 0.0]


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
