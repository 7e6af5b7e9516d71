"""The media of sampled texts on a page, as data: URLs, so that the page stays one file."""

import base64
import html
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rft.logger.media import MEDIA, MediaFile, media_file, media_files
from rft.report.page import LONGEST, cut

MOST_MIB = 8  # of files whose content is on a page
TINY = 160  # a picture with at most these columns and rows is shown enlarged


class PageMedia:
    """Draws messages with media. The content of each file is on the page once, where it is first shown.

    Args:
        run: the run folder.
        values: what the page may show, the most important first: the files are taken in this order up to `MOST_MIB`,
            and others are links to the folder.

    Attributes:
        note: HTML that says so.
    """

    note = (
        f'<p class="note">The page holds at most {MOST_MIB} MiB of media, those of the last steps first; the '
        "others are links to the folder of the run.</p>"
    )

    def __init__(self, run: Path, values: Iterable[Any]) -> None:
        self._run = run
        self._chosen: set[Path] = set()
        self._drawn: set[Path] = set()
        left = MOST_MIB * 2**20
        for file in media_files(list(values), run):
            if file.path not in self._chosen and file.path.is_file():
                size = file.path.stat().st_size
                if size <= left:
                    left -= size
                    self._chosen.add(file.path)

    def has(self, value: Any) -> bool:
        """Whether a value of a row names media."""
        return next(media_files(value, self._run), None) is not None

    def messages(self, value: Any) -> str:
        """HTML of chat messages, each with its role if there are several; of another value, the media in it."""
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            return "".join(map(self._draw, media_files(value, self._run)))
        drawn = []
        for message in value:
            role = f"<small>{html.escape(str(message.get('role', '')))}</small>" if len(value) > 1 else ""
            content = message.get("content")
            parts = content if isinstance(content, list) else [content]
            drawn.append(role + "".join(map(self._part, parts)))
        return "".join(drawn)

    def _part(self, part: Any) -> str:
        if (file := media_file(part, self._run)) is not None:
            return self._draw(file)
        text = part.get("text", f"<{part.get('type')}>") if isinstance(part, dict) else part
        return f'<div class="text">{html.escape(cut(str(text), LONGEST))}</div>' if text else ""

    def _draw(self, file: MediaFile) -> str:
        name = file.path.name
        if file.path not in self._chosen:
            return f'<a class="medium" href="{MEDIA}/{name}">{MEDIA}/{name}</a>'
        if file.path in self._drawn:
            source = f'data-same="{name}"'
        else:
            self._drawn.add(file.path)
            source = f'id="{name}" src="data:{file.mime};base64,{base64.b64encode(file.path.read_bytes()).decode()}"'
        if file.plays:
            return f'<{file.kind} class="medium" controls preload="metadata" {source}></{file.kind}>'
        style = " tiny" if _is_tiny(file.path) else ""
        return f'<img class="medium{style}" alt="{name}" {source}>'


def _is_tiny(path: Path) -> bool:
    """Whether a PNG file has few columns and rows."""
    with path.open("rb") as file:
        head = file.read(24)
    return head.startswith(b"\x89PNG") and len(head) == 24 and max(struct.unpack(">II", head[16:])) <= TINY
