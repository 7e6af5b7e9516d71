"""Audio of every form becomes one channel of numbers of which 1 is the full scale, at the rate of the model."""

import io
import random
import struct
import sys
import types
import wave
from pathlib import Path

import numpy as np
import pytest

from rft.data.encode.media.audio import open_audio, samples_of

PCM = bytes.fromhex("000000001000800000aa00389b71")  # the end of the name of a format in an extensible header


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
        (whole[:20], r"is not a wav file of integers or floating-point numbers \(.*pip install \"rft\[audio\]\""),
        (b"", "is not a wav file of integers"),
        (b"ID3 some mp3", "is not a wav file of integers"),
        (wav([[0]], 2)[:-2].replace(b"data\x02", b"data\x00"), "has no samples"),
        (
            whole[:34] + struct.pack("<H", 64) + whole[36:],
            r"is not a wav file of .* numbers \(samples of 64 bits\)",
        ),
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
    with pytest.raises(
        ValueError, match=r"has 8000 samples per second, and the model reads 16000; .*pip install \"rft\[audio\]\""
    ):
        open_audio(data, 16000)

    def resample(samples: np.ndarray, rate: int, new: int) -> np.ndarray:
        return np.repeat(samples, new // rate).astype(np.float64)

    monkeypatch.setitem(sys.modules, "soxr", types.SimpleNamespace(resample=resample))  # type: ignore[arg-type]
    found = open_audio(data, 16000)
    assert found.dtype == np.float32 and found.tolist() == [0.5, 0.5, 0.0, 0.0]


def riff(samples: bytes, form: bytes, size: int | None = None) -> bytes:
    """A file with a header of its own, and a chunk of an odd size before the samples."""
    size = len(samples) if size is None else size
    chunks = struct.pack("<4sI", b"fmt ", len(form)) + form + struct.pack("<4sI3sx", b"LIST", 3, b"abc")
    whole = b"WAVE" + chunks + struct.pack("<4sI", b"data", size) + samples
    return struct.pack("<4sI", b"RIFF", len(whole)) + whole


def form(kind: int, bits: int, channels: int = 1, rate: int = 8000, width: int | None = None) -> bytes:
    width = bits // 8 if width is None else width
    return struct.pack("<HHIIHH", kind, channels, rate, rate * channels * width, channels * width, bits)


def extensible(kind: int, bits: int, valid: int, channels: int) -> bytes:
    return form(0xFFFE, bits, channels) + struct.pack("<HHIH", 22, valid, 3, kind) + PCM


@pytest.mark.parametrize(
    ("header", "samples", "expected"),
    [
        (form(3, 32, 2), np.array([1, 0, -0.5, 0.25, 1.5, 0.5], "<f4"), [0.5, -0.125, 1.0]),
        (form(3, 64), np.array([1, -1, 2**-20], "<f8"), [1.0, -1.0, 2**-20]),
        (extensible(1, 16, 16, 2), np.array([2**14, 0, -(2**15), 2**14], "<i2"), [0.25, -0.25]),
        (extensible(1, 32, 24, 1), np.array([(2**23 - 1) << 8, -(2**31)], "<i4"), [1 - 2**-23, -1.0]),
        (extensible(3, 32, 32, 4), np.array([1, 0, 0, 0, 0.5, 0.5, 0.5, -0.5], "<f4"), [0.25, 0.25]),
        (form(1, 20, width=3), np.frombuffer(bytes([0xF0, 0xFF, 0x7F, 0, 0, 0xC0]), np.uint8), [1 - 2**-19, -0.5]),
    ],
)  # fmt: skip
def test_wav_files_with_other_headers(header: bytes, samples: np.ndarray, expected: list[float]) -> None:
    for size in (None, 0xFFFFFFFF):  # as a program writes it into a pipe
        found = open_audio(riff(samples.tobytes(), header, size), 8000)
        assert found.dtype == np.float32 and found.tolist() == expected


def test_24_bits_with_an_extensible_header() -> None:
    """As ffmpeg writes them."""
    data = b"".join(n.to_bytes(3, "little", signed=True) for n in (2**23 - 1, 0, -(2**23), 2**22))
    assert open_audio(riff(data, extensible(1, 24, 24, 2)), 8000).tolist() == [np.float32(0.5 - 2**-24), -0.25]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (form(7, 8), "format 7"),  # mu-law
        (extensible(6, 8, 8, 1), "format 6"),
        (form(3, 16), "samples of 16 bits"),
        (form(1, 24, width=4), "1 channels of 24 bits in 4 bytes, 8000 a second"),
        (form(1, 16, rate=0), "0 a second"),
        (form(1, 16, channels=0), "0 channels"),
    ],
)
def test_wav_files_that_only_soundfile_reads(header: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ValueError, match=rf"is not a wav file of integers or floating-point numbers \(.*{reason}"):
        open_audio(riff(bytes(12), header), 8000)


def test_arrays_of_integers_are_scaled_as_files_are() -> None:
    for kind, given, expected in (
        (np.uint8, [128, 0, 192], [0.0, -1.0, 0.5]),
        (np.int8, [0, -128, 64], [0.0, -1.0, 0.5]),
        (np.int16, [0, -(2**15), 2**14], [0.0, -1.0, 0.5]),
        (np.int32, [0, -(2**31), 2**30], [0.0, -1.0, 0.5]),
        (np.float64, [0.0, -1.0, 0.5], [0.0, -1.0, 0.5]),
        (np.int64, [0, -1, 1], [0.0, -1.0, 1.0]),  # numbers of a JSON file
    ):
        found = samples_of(np.array(given, kind))
        assert found.dtype == np.float32 and found.tolist() == expected
    assert samples_of([]).tolist() == []
    with pytest.raises(ValueError, match=r"integers up to 20000 \(int64\); give floating-point numbers between -1 and"):
        samples_of([0, -20000])
    with pytest.raises(ValueError, match=r"has the shape \(2, 3\); give the samples of one channel, such as the mean"):
        samples_of(np.zeros((2, 3)))


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_a_resampled_sine_keeps_its_frequency_and_amplitude(rate: int) -> None:
    """440 Hz of the amplitude 0.5 on one of two channels, and of 0.3 on the other: 0.4, from 24 bits."""
    pytest.importorskip("soxr")
    sine = np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    frames = np.round(np.stack([0.5 * sine, 0.3 * sine], 1) * 2**23).astype(int).tolist()
    found = open_audio(wav(frames, 3, rate), 16000)
    assert found.shape == (16000,) and found.dtype == np.float32
    expected = 0.4 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert np.abs(found - expected)[500:-500].max() < 1e-3
    spectrum = np.abs(np.fft.rfft(found * np.hanning(16000))) / 16000 * 4
    assert spectrum.argmax() == 440 and spectrum[440] == pytest.approx(0.4, abs=2e-3)


def test_soundfile_reads_what_is_no_wav_of_numbers() -> None:
    soundfile = pytest.importorskip("soundfile")
    samples = np.array([[0.5, 0.25], [-0.5, 0.0], [0.75, 0.25]])
    for name, subtype, exact in (("FLAC", "PCM_24", True), ("WAV", "ULAW", False), ("AIFF", "PCM_S8", True)):
        file = io.BytesIO()
        soundfile.write(file, samples, 8000, subtype, format=name)
        found = open_audio(file.getvalue(), 8000)
        assert np.abs(found - [0.375, -0.25, 0.5]).max() <= (0 if exact else 0.02)
