"""The content parts of written lines lead to the files of the run folder, and nothing else does."""

from pathlib import Path
from typing import Any

import pytest

from rft.logger.media import MediaFile, media_file, media_files


def part(kind: str, value: Any) -> dict[str, Any]:
    return {"type": kind, kind: value}


def test_files_are_found_in_their_order() -> None:
    run = Path("/run")
    line = {"prompt": [{"role": "user", "content": [part("image", "../media/1b.png"), part("audio", "media/2b.mp3")]}]}
    picture, sound = media_files(line, run)
    assert picture == MediaFile(run / "media/1b.png", "image/png") and not picture.plays
    assert sound == MediaFile(run / "media/2b.mp3", "audio/mpeg") and sound.plays and sound.kind == "audio"


@pytest.mark.parametrize(
    "value",
    [
        *("../media/1b.png", {"type": "text", "text": "../media/1b.png.exe"}, part("image", "/etc/passwd"), None, []),
        *(part("image", "../media/../../1b.png"), part("image", "../media/1b.svg"), part("image", None), {"type": []}),
        *({"type": "image"}, part("image", "x/media/1b.png"), part("image", "../media/1b.png\n")),
    ],
)
def test_other_values_are_no_files(value: Any) -> None:
    assert media_file(value, Path("/run")) is None and list(media_files({"a": [value]}, Path("/run"))) == []
