"""The media of sampled texts: files in the folder `media/` of a run, which lines of JSON name by relative paths."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

MEDIA = "media"  # the folder
FORMATS = {  # MIME types of the files in it, by their suffix
    "png": "image/png",
    "jpg": "image/jpeg",
    "gif": "image/gif",
    "webp": "image/webp",
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "ogg": "audio/ogg",
    "mp4": "video/mp4",
    "webm": "video/webm",
}
REFERENCE = re.compile(rf"(?:\.\./)?{MEDIA}/([0-9a-f]+\.({'|'.join(FORMATS)}))")


@dataclass(frozen=True)
class MediaFile:
    """A file in the folder `media/` of a run.

    Attributes:
        path: of the file.
        mime: its type, such as `image/png`.
    """

    path: Path
    mime: str

    @property
    def kind(self) -> str:
        """The first part of the type."""
        return self.mime.partition("/")[0]

    @property
    def plays(self) -> bool:
        """Whether it has a duration, unlike a picture."""
        return self.kind != "image"

    def wrapped(self, package: ModuleType) -> Any:
        """The file as an object of a tracking package with the classes `Image`, `Audio` and `Video`."""
        return vars(package)[self.kind.title()](str(self.path))


def media_file(part: Any, run: Path) -> MediaFile | None:
    """The file that a content part of a line names, `{type: <kind>, <kind>: ../media/...}`; None of another value."""
    named = part.get(part.get("type")) if isinstance(part, dict) and isinstance(part.get("type"), str) else None
    found = REFERENCE.fullmatch(named) if isinstance(named, str) else None
    return None if found is None else MediaFile(run / MEDIA / found[1], FORMATS[found[2]])


def media_files(value: Any, run: Path) -> Iterator[MediaFile]:
    """The files that the content parts in a value of a line name, in their order."""
    if (found := media_file(value, run)) is not None:
        yield found
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from media_files(inner, run)
