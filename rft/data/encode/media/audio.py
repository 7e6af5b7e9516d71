"""Opens audio: one channel of floating-point numbers, of which 1 is the full scale, at the rate of the model."""

import io
import struct
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

INTEGERS, FLOATS, EXTENSIBLE = 1, 3, 0xFFFE  # formats of WAV; the last names one of the others further on
TO_THE_END = 0xFFFFFFFF  # bytes of samples, as a program writes them that does not know how many will follow


def open_audio(value: Any, sampling_rate: int) -> np.ndarray:
    """The samples (N,) of audio in float32, of which 1 is the full scale; the mean of its channels.

    Args:
        value: in the normal form.
        sampling_rate: of the result, in samples per second.

    Raises:
        ValueError: the file is damaged or empty, or a package that its format or rate needs is missing; names the file.
    """
    samples, rate = sound(value)
    if rate == sampling_rate:
        return samples
    try:
        import soxr
    except ImportError as error:
        raise ValueError(
            f"{name_of(value)} has {rate} samples per second, and the model reads {sampling_rate}; install the package "
            'that resamples it (pip install "rft[audio]"), or convert the file'
        ) from error
    return np.asarray(soxr.resample(samples, rate, sampling_rate), np.float32)


def sound(value: Any) -> tuple[np.ndarray, int]:
    """The samples (N,) of audio in float32, the mean of its channels, and its sampling rate.

    Raises:
        ValueError: the file cannot be read, is damaged or empty; names it.
    """
    name = name_of(value)
    if isinstance(value, Mapping):
        samples, rate = value["array"], value["sampling_rate"]
    else:
        frames, rate = _frames(value, name)
        samples = frames.mean(1, dtype=np.float64).astype(np.float32)
    if not samples.size or not np.isfinite(samples).all():
        raise ValueError(f"{name} has no samples, or one that is not finite; replace it, or remove the row")
    return samples, rate


def samples_of(array: Any) -> np.ndarray:
    """The samples (N,) of an array in float32. Integers of 8, 16 and 32 bits are scaled as those of files.

    Raises:
        ValueError: the array has several channels, or integers of which the full scale is not known.
    """
    samples = np.asarray(array)
    if samples.ndim != 1:
        raise ValueError(
            f"an array of audio has the shape {samples.shape}; give the samples of one channel, such as the mean over "
            "the channels"
        )
    if samples.dtype == np.uint8:
        return _scaled(samples.astype(np.int16) - 128, 8)
    if samples.dtype in (np.int8, np.int16, np.int32):
        return _scaled(samples, 8 * samples.dtype.itemsize)
    if samples.dtype.kind in "iu" and (largest := np.abs(samples.astype(np.float64)).max(initial=0)) > 1:
        raise ValueError(
            f"an array of audio has integers up to {largest:.0f} ({samples.dtype}); give floating-point numbers "
            "between -1 and 1, or an array of int16 or int32"
        )
    return samples.astype(np.float32, copy=False)


def played(samples: np.ndarray, rate: int) -> tuple[bytes, str]:
    """A WAV file of 16 bits and one channel, and its suffix."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((1, 2, int(rate), 0, "NONE", ""))
        file.writeframes((samples * 2**15).round().clip(-(2**15), 2**15 - 1).astype("<i2").tobytes())
    return made.getvalue(), "wav"


def _scaled(samples: np.ndarray, bits: int) -> np.ndarray:
    """Integers with a sign as a part of the full scale."""
    return (samples / 2.0 ** (bits - 1)).astype(np.float32)


def _frames(value: str | bytes, name: str) -> tuple[np.ndarray, int]:
    """The samples (N, channels) of a file, and its sampling rate."""
    data = read(value)
    try:
        kind, channels, width, rate, body, size = _parsed(data)
    except (ValueError, struct.error) as reason:
        return _frames_of_soundfile(data, name, reason)
    count = (len(body) if size == TO_THE_END else size) // (channels * width)
    if len(body) < count * channels * width:
        raise ValueError(f"{name} ends before its {count} samples; replace it, or remove the row")
    body = body[: count * channels * width]
    if kind == FLOATS:
        return np.frombuffer(body, f"<f{width}").reshape(count, channels), rate
    aligned = np.zeros((count, channels, 4), np.uint8)  # the samples as the high bytes of 32 bits
    aligned[..., 4 - width :] = np.frombuffer(body, np.uint8).reshape(count, channels, width)
    if width == 1:
        aligned[..., 3] ^= 128  # 8-bit samples have no sign
    return aligned.view("<i4")[..., 0] / 2.0**31, rate


def _parsed(data: bytes) -> tuple[int, int, int, int, memoryview, int]:
    """Format, channels, bytes of a sample, sampling rate, the bytes behind the header, and how many are samples.

    Raises:
        ValueError, struct.error: this is no WAV file of integers or floating-point numbers; the text is the reason.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise ValueError("it does not begin as one")
    place, form = 12, None
    while place + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, place)
        place += 8
        if name == b"fmt ":
            form = kind, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", data, place)
            if kind == EXTENSIBLE:
                [kind] = struct.unpack_from("<H", data, place + 24)
            width = (bits + 7) // 8
            if kind not in (INTEGERS, FLOATS):
                raise ValueError(f"format {kind}")
            if width not in ((1, 2, 3, 4) if kind == INTEGERS else (4, 8)):
                raise ValueError(f"samples of {bits} bits")
            if not channels or not rate or block != channels * width:
                raise ValueError(f"{channels} channels of {bits} bits in {block} bytes, {rate} a second")
        elif name == b"data" and form is not None:
            return kind, channels, width, rate, memoryview(data)[place:], size
        place += size + size % 2
    raise ValueError("it has no samples")


def _frames_of_soundfile(data: bytes, name: str, reason: Exception) -> tuple[np.ndarray, int]:
    """The samples (N, channels) of a file of another format, and its sampling rate."""
    try:
        import soundfile
    except ImportError as error:
        raise ValueError(
            f"{name} is not a wav file of integers or floating-point numbers ({reason}); install the package that "
            'reads other formats (pip install "rft[audio]"), replace the file, or remove the row'
        ) from error
    try:
        frames, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)  # (N, channels)
    except soundfile.LibsndfileError as error:
        raise ValueError(
            f"{name} cannot be read as audio ({error.error_string}); replace it, or remove the row"
        ) from error
    return frames, rate


def read(value: str | bytes) -> bytes:
    """The content of a file, of its path or as it is.

    Raises:
        ValueError: the file cannot be read; names it.
    """
    if isinstance(value, bytes):
        return value
    try:
        return Path(value).read_bytes()
    except OSError as error:
        raise ValueError(f"{value} cannot be read ({error}); replace it, or remove the row") from error


def name_of(value: Any) -> str:
    """What a message calls a value."""
    if isinstance(value, str):
        return value
    return f"a file of {len(value):,} bytes" if isinstance(value, bytes) else f"a value ({type(value).__name__})"
