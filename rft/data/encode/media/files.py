"""Opens images and video, the values in the content parts of rows, and makes small files of all media."""

import base64
import io
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rft.data.encode.media.audio import FLOATS, name_of, played, read, sound
from rft.logger.media import FORMATS

if TYPE_CHECKING:  # an optional package, imported when the first image is opened
    from PIL.Image import Image

LARGEST = 64_000_000  # pixels of an image or a frame, of three bytes each; a small file can claim any number
VIDEOS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,ogg,flv,gif"  # none of them names other files or addresses, as HLS does
MOST_FRAMES = 200_000  # that a file has; two hours at 27 a second
MOST_BYTES = 2**30  # of the chosen frames, three for each pixel; a small file can have any number of them
FORMS = (str, bytes, np.ndarray)  # of an image, beside that of PIL
SMALL = 2**20  # bytes of a file for people
SIDE = 1024  # pixels of its longer side, if a picture is drawn again
BEGINNINGS = {  # of files, and their suffix; WAV and WebP, which begin alike, have another rule
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpg",
    b"GIF8": "gif",
    b"ID3": "mp3",
    b"\xff\xfb": "mp3",
    b"\xff\xf3": "mp3",
    b"fLaC": "flac",
    b"OggS": "ogg",
    b"\x1a\x45\xdf\xa3": "webm",
}
MP4 = (b"iso", b"mp4", b"avc", b"M4V")  # brands of mp4; other files of this container are images
Metadata = dict[str, Any]  # as `VideoMetadata` of transformers takes it
Choose = Callable[[Metadata], Sequence[int]]
# What pillow raises for damaged files, beside an error of its own.
DAMAGED = (OSError, ValueError, SyntaxError, EOFError, TypeError, IndexError, KeyError, OverflowError, struct.error)


class Video(NamedTuple):
    """The frames that a model reads of a video.

    Attributes:
        frames: (n, H, W, 3) uint8, in RGB.
        metadata: of the whole video, with the numbers of the frames; without `fps` where a row gives frames.
    """

    frames: np.ndarray
    metadata: Metadata


def open_image(value: Any) -> "Image":
    """Opens an image, in RGB and turned as its metadata say; what is transparent stands on white.

    Args:
        value: in the normal form.

    Raises:
        ValueError: the file is damaged, too large or of another format; names the file.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ValueError("images need the package pillow: pip install pillow") from error
    name = name_of(value)
    try:
        if isinstance(value, np.ndarray):
            picture: Image.Image = Image.fromarray(value)
        else:
            picture = Image.open(io.BytesIO(read(value))) if isinstance(value, str | bytes) else value
        if picture.width * picture.height > LARGEST:
            raise ValueError(f"{picture.width} x {picture.height} pixels are more than {LARGEST:,}")
        return _in_rgb(ImageOps.exif_transpose(picture))
    except DAMAGED as error:
        reason = "of an unknown format" if isinstance(error, UnidentifiedImageError) else error
        raise ValueError(f"{name} cannot be read as an image ({reason}); replace it, or remove the row") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name} is too large ({error}); shrink it, or remove the row") from error


def _in_rgb(picture: "Image") -> "Image":
    """A picture in RGB. pillow alone drops transparency, which is mostly black below, and clips grey of 16 bits."""
    from PIL import Image

    if picture.mode.startswith("I;16"):
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    drawn = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn).convert("RGB")


def open_video(value: Any, choose: Choose) -> Video:
    """Opens a video; every frame of those that a row gives as images or as an array, and the chosen ones of a file.

    Args:
        value: in the normal form.
        choose: see `read_video`.

    Raises:
        ValueError: as `read_video`, or frames that differ in size; names the file.
    """
    if isinstance(value, str | bytes):
        return read_video(value, name_of(value), choose)
    if isinstance(value, np.ndarray):
        if value.ndim != 4 or value.shape[-1] != 3 or value.dtype != np.uint8:
            raise ValueError(f"an array {value.shape} of {value.dtype} is no video; give (frames, H, W, 3) of uint8")
        frames = value
        _check_size(*frames.shape[:3])
    else:
        first = open_image(value[0])
        _check_size(len(value), first.height, first.width)
        opened = [np.asarray(open_image(frame)) for frame in value]
        if len(sizes := {frame.shape for frame in opened}) > 1:
            raise ValueError(f"the frames of a video have the shapes {sorted(sizes)}; scale them to one size")
        frames = np.stack(opened)
    count, height, width = frames.shape[:3]
    facts = {"total_num_frames": count, "height": height, "width": width, "frames_indices": list(range(count))}
    return Video(frames, facts)


def read_video(file: str | bytes, name: str, choose: Choose) -> Video:
    """Decodes a file twice: its frames are counted, for headers can be wrong, and then the chosen ones are kept.

    Args:
        file: its path or content.
        name: what messages call it.
        choose: returns the numbers of the frames to keep, from the metadata of the video.

    Raises:
        ValueError: the file is damaged, too large or of another format, or the package av is missing; names the file.
    """
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need the package av: pip install av") from error
    try:
        place, options = io.BytesIO(file) if isinstance(file, bytes) else file, {"format_whitelist": VIDEOS}
        with av.open(place, "r", options=options) as c:
            if not c.streams.video or c.streams.video[0].codec_context is None:
                raise ValueError("it has no video of a known format")
            stream = c.streams.video[0]
            width, height, fps = stream.width, stream.height, stream.average_rate or stream.guessed_rate
            _check_size(1, height, width)
            if not fps:
                raise ValueError("it has no frame rate")
            count = 0
            for count, _ in enumerate(c.decode(stream), 1):
                if count > MOST_FRAMES:
                    raise ValueError(f"it has more than {MOST_FRAMES:,} frames")
            if not count:
                raise ValueError("it has no frames")
            metadata = {
                "total_num_frames": count,
                "fps": float(fps),
                "duration": float(count / fps),
                "width": width,
                "height": height,
            }
            chosen = [int(number) for number in choose(metadata)]
            _check_size(len(chosen), height, width)
            if outside := [number for number in chosen if not 0 <= number < count]:
                raise ValueError(f"frame {outside[0]} is chosen of {count}")
            frames = np.empty((len(chosen), height, width, 3), np.uint8)
            c.seek(0)
            for number, frame in enumerate(c.decode(stream)):
                if places := [place for place, index in enumerate(chosen) if index == number]:
                    frames[places] = frame.to_ndarray(format="rgb24", width=width, height=height)
                if number == max(chosen):
                    break
            return Video(frames, metadata | {"frames_indices": chosen})
    except (av.FFmpegError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{name} cannot be read as a video ({error}); replace it, or remove the row") from error


def _check_size(count: int, height: int, width: int) -> None:
    """Raises a ValueError unless frames of this number and size fit into the limits of this module."""
    if not 0 < height * width <= LARGEST:
        raise ValueError(f"frames of {width} x {height} pixels are none, or more than {LARGEST:,}")
    if not 0 < count * height * width * 3 <= MOST_BYTES:
        raise ValueError(
            f"{count:,} chosen frames of {width} x {height} pixels are none, or more than {MOST_BYTES:,} bytes; choose "
            "another number by actor.processor.video_fps"
        )


def small_file(kind: str, value: Any) -> tuple[bytes, str] | None:
    """The content of a file that people look at or listen to, and its suffix, one of `FORMATS`.

    A file of such a format and of at most `SMALL` bytes is unchanged. Other images are drawn with at most `SIDE` pixels
    a side; other audio becomes WAV of 16 bits and one channel, of which the beginning fits into `SMALL` bytes. Of
    another video the first frame is drawn.

    Args:
        kind: one of `KINDS`.
        value: in the normal form, or a data: URL.

    Returns:
        None for a kind of which no small file is made, and for a value of another form or a file that is not there.

    Raises:
        ValueError: the file is damaged; names it.
    """
    if isinstance(value, str):
        if value.startswith("data:"):
            value = base64.b64decode(value.partition(",")[2])
        elif not Path(value).is_absolute() or not Path(value).is_file():
            return None
    if (file := _known_file(kind, value)) is not None and len(file[0]) <= SMALL:
        return file
    if kind == "image" and (isinstance(value, FORMS) or type(value).__module__.startswith("PIL.")):
        return _drawn(open_image(value))
    if kind == "video" and isinstance(value, str | bytes | np.ndarray | list):
        return _drawn(open_image(open_video(value, lambda metadata: [0]).frames[0]))
    heard = isinstance(value, str | bytes) or (isinstance(value, Mapping) and {"array", "sampling_rate"} <= {*value})
    if kind != "audio" or not heard:
        return None
    samples, rate = sound(value)
    return played(samples[: SMALL // 2], rate)


def file_of(kind: str, value: Any) -> tuple[bytes, str]:
    """The content of a file with a medium, and its suffix, one of `FORMATS`; that of a file of such a format unchanged.

    Other images, of PIL or an array, become PNG; other audio becomes WAV of 16 bits and one channel.

    Args:
        kind: one of `KINDS`.
        value: in the normal form.

    Raises:
        ValueError: a file cannot be read, or is damaged, or video is no such file; names it.
    """
    if (file := _known_file(kind, value)) is not None:
        return file
    if kind == "audio":
        return played(*sound(value))
    if kind == "video":
        raise ValueError(f"{name_of(value)} is no mp4 or webm file, and other videos are not converted; remove the row")
    return _png(open_image(value)), "png"


def data_url(data: bytes, suffix: str) -> str:
    """The data: URL of the content of a file."""
    return f"data:{FORMATS.get(suffix, 'application/octet-stream')};base64,{base64.b64encode(data).decode()}"


def lossless_url(opened: "Image | np.ndarray", sampling_rate: int) -> str:
    """The data: URL of an opened medium: an image as PNG, audio as WAV of 32-bit floating-point numbers.

    Args:
        opened: as `open_image` or `open_audio` returns it.
        sampling_rate: of audio, in samples per second.
    """
    if isinstance(opened, np.ndarray):
        data = opened.astype("<f4").tobytes()
        form = struct.pack("<4sIHHIIHH", b"fmt ", 16, FLOATS, 1, sampling_rate, 4 * sampling_rate, 4, 32)
        head = struct.pack("<4sI4s", b"RIFF", 4 + len(form) + 8 + len(data), b"WAVE")
        return data_url(head + form + struct.pack("<4sI", b"data", len(data)) + data, "wav")
    return data_url(_png(opened), "png")


def whole_file(kind: str, value: Any) -> tuple[bytes, str] | None:
    """The content of a medium that is bytes, and the suffix of a file of it; None for another, such as a path."""
    return (value, _suffix(value) or "bin") if isinstance(value, bytes) else None


def _known_file(kind: str, value: Any) -> tuple[bytes, str] | None:
    """The content of a file of a format in `FORMATS` and its suffix; None for another format, and for no file."""
    if not isinstance(value, str | bytes):
        return None
    data = read(value)
    suffix = _suffix(data)
    return (data, suffix) if FORMATS.get(suffix, "").startswith(f"{kind}/") else None


def _suffix(data: bytes) -> str:
    """The suffix of a file by its first bytes; empty for another format."""
    if data[:4] == b"RIFF":
        return {b"WAVE": "wav", b"WEBP": "webp"}.get(data[8:12], "")
    if data[4:8] == b"ftyp" and data[8:11] in MP4:
        return "mp4"
    return next((suffix for beginning, suffix in BEGINNINGS.items() if data.startswith(beginning)), "")


def _drawn(picture: "Image") -> tuple[bytes, str]:
    picture.thumbnail((SIDE, SIDE))
    if len(data := _png(picture)) <= SMALL:
        return data, "png"
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return file.getvalue(), "jpg"


def _png(picture: "Image") -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
