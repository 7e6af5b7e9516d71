"""Videos are opened from files, bytes, arrays and images; damaged and large ones are named. None needs torchvision."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rft.data.encode import media_files
from rft.data.encode.media_files import MOST_BYTES, file_of, open_video, read_video, small_file
from rft.data.encode.parts import media_of, normalize_media, with_data_urls

av = pytest.importorskip("av")
GREY = 10  # a frame is brighter than that before it by this


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


def test_damaged_files_are_named(tmp_path: Path) -> None:
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


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    data = movie()
    count = MOST_BYTES // (16 * 32 * 3) + 1
    with pytest.raises(ValueError, match=rf"{count:,} chosen frames of 32 x 16 pixels are .* by actor\.processor\.vid"):
        read_video(data, "a", lambda metadata: range(count))
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


def test_a_file_for_people_is_the_file_or_its_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    for form in ("mp4", "webm"):
        assert small_file("video", data := movie(form=form)) == (data, form) == file_of("video", data)
    frames = np.full((2, 4, 6, 3), 7, np.uint8)
    for value in (frames, list(frames)):
        drawn = small_file("video", value)
        assert drawn is not None and drawn[1] == "png" and Image.open(io.BytesIO(drawn[0])).getpixel((5, 3)) == (7,) * 3
    monkeypatch.setattr("rft.data.encode.media_files.SMALL", 100)
    drawn = small_file("video", movie())
    assert drawn is not None and drawn[1] in ("png", "jpg")
    with pytest.raises(ValueError, match=r"is no mp4 or webm file, and video is not written anew"):
        file_of("video", frames)


def test_rows_of_other_libraries_have_the_normal_form(tmp_path: Path) -> None:
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
