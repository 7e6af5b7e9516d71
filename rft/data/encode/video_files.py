"""Decodes the frames of video files that a model reads."""

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

FORMATS = (
    "mov,mp4,matroska,webm,avi,mpegts,mpeg,ogg,flv,gif"  # none of them names other files or addresses, as HLS does
)
LARGEST = 64_000_000  # pixels of a frame
MOST_FRAMES = 200_000  # that a file has; two hours at 27 a second
MOST_BYTES = 2**30  # of the chosen frames, three for each pixel; a small file can have any number of them

Metadata = dict[str, Any]  # as `VideoMetadata` of transformers takes it
Choose = Callable[[Metadata], Sequence[int]]


class Video(NamedTuple):
    """The frames that a model reads of a video.

    Attributes:
        frames: (n, H, W, 3) uint8, in RGB.
        metadata: of the whole video, with the numbers of the frames; without `fps` where a row gives frames.
    """

    frames: np.ndarray
    metadata: Metadata


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
        with av.open(io.BytesIO(file) if isinstance(file, bytes) else file, options={"format_whitelist": FORMATS}) as c:
            if not c.streams.video:
                raise ValueError("it has no video")
            stream = c.streams.video[0]
            width, height, fps = stream.width, stream.height, stream.average_rate or stream.guessed_rate
            check_size(1, height, width)
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
            check_size(len(chosen), height, width)
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


def check_size(count: int, height: int, width: int) -> None:
    """Raises a ValueError unless frames of this number and size fit into the limits of this module."""
    if not 0 < height * width <= LARGEST:
        raise ValueError(f"frames of {width} x {height} pixels are none, or more than {LARGEST:,}")
    if not 0 < count * height * width * 3 <= MOST_BYTES:
        raise ValueError(
            f"{count:,} chosen frames of {width} x {height} pixels are none, or more than {MOST_BYTES:,} bytes; choose "
            "another number by actor.processor.video_fps"
        )
