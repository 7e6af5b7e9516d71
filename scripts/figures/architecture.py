"""Draws docs/pictures/architecture.svg: the rooms of the core by their floor, and beside them the parts."""

import importlib
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WHAT = {  # what a room of the core has
    "main": "composes the config, imports plugins, runs the mode",
    "modes": "what mode= names; train is of the core",
    "setup": "config to objects, and all mistakes of a config before a model is loaded",
    "train": "the one loop, stages, checkpoints, the run folder",
    "evaluation": "held-out sets and their metrics",
    "rollout": "sources of sampled text, the sampler, the engine hf",
    "reward": "terms, how they are called, their weighted sum",
    "data": "rows, their tokens and masks, sources of given batches",
    "actor": "models that compute columns and maybe train",
    "strategy": "how a model is spread: one process, FSDP2",
    "algorithm": "the math: advantages, losses, KL, weights; no I/O",
    "report": "pages and charts of a run folder",
    "remote": "HTTP, retries, processes",
    "worker": "one child process: call, deadline, death",
    "batch": "columns, padding, balance, trajectories",
    "logger": "console and metrics.jsonl",
}
BASE = "registry, errors, metrics ..."  # the modules beside the folders
LEFT, CORE, PARTS, WIDTH = 56, 590, 420, 1120  # pixels: the core's left edge, the widths of both sides, the width
PAD, LINE, LETTER = 8, 16, 6.4  # pixels: between boxes, of a line, of a letter at 12 pixels
INK, DIM, CORE_FILL, PART_FILL = "#1f2328", "#59636e", "#dbeafe", "#fef3c7"


@dataclass(frozen=True)
class Part:
    """A part: the floor of its room, its lines of code, and the parts within it."""

    name: str
    floor: int
    lines: int
    inner: tuple["Part", ...] = ()


@dataclass(frozen=True)
class Figures:
    """Lines of code: of both sides, of every room without its parts, and of the parts. A file may be of several."""

    core: int
    of_parts: int
    rooms: Mapping[str, int]
    parts: tuple[Part, ...]
    floors: Mapping[str, int]


def measure(root: Path, lines: Mapping[Path, int]) -> Figures:
    """Counts by the layers and the parts in tests/architecture/ of a checkout.

    Args:
        root: of the checkout.
        lines: of code, of each of its files.
    """
    sys.path.append(str(root))
    layers: dict[str, int] = importlib.import_module("tests.architecture.rules").LAYERS
    table = importlib.import_module("tests.architecture.parts")
    files: dict[str, set[Path]] = table.files_of_parts(root)
    taken = set().union(*files.values())
    rooms: Counter[str] = Counter()
    for path in lines.keys() - taken:
        room = path.relative_to(root / "rft").parts[0].removesuffix(".py")
        rooms[room if room in layers else BASE] += lines[path]
    floors = {**layers, BASE: -1}

    def part(name: str) -> Part:
        floor = floors[Path(table.PARTS[name][0]).parts[1]]
        inner = [other for other in files if files[other] < files[name]]
        nested = tuple(each for each in map(part, inner) if each.floor == floor)
        return Part(name, floor, sum(lines[path] for path in files[name]), nested)

    parts = [part(name) for name in files]
    within = {each.name for outer in parts for each in outer.inner}
    count = sum(lines[path] for path in taken)
    outer_parts = tuple(each for each in parts if each.name not in within)
    return Figures(sum(rooms.values()), count, rooms, outer_parts, floors)


def draw(figures: Figures) -> str:
    """The drawing, as SVG."""
    shapes, y = [], 64
    for floor in sorted(set(figures.floors.values()), reverse=True):
        rooms = [name for name, number in figures.floors.items() if number == floor]
        parts, height = _parts([part for part in figures.parts if part.floor == floor], LEFT + CORE + 40, y, PARTS)
        core, height = _rooms(rooms, figures.rooms, y, height)
        number = "" if floor < 0 else str(floor)
        shapes += [_text(20, y + LINE + 2, number, DIM, 14), *core, *parts]
        y += height + PAD
        shapes.append(f'<path d="M {LEFT - 8} {y} H {WIDTH - 10}" stroke="#d1d9e0"/>')
        y += PAD
    wall = LEFT + CORE + 20
    heads = [
        _text(LEFT, 24, "Core: in every run", INK, 16, bold=True),
        _lines(LEFT + CORE, 24, figures.core, " lines of code"),
        _text(LEFT + CORE + 40, 24, "Parts: a yaml chooses them", INK, 16, bold=True),
        _lines(LEFT + CORE + 40 + PARTS, 24, figures.of_parts, " lines of code"),
        _text(10, 46, "floor", DIM),
        _text(LEFT, 46, "A room imports only from floors below it, or from itself.", DIM),
        _text(LEFT + CORE + 40, 46, "Nothing outside a part imports it.", DIM),
        f'<path d="M {wall} 10 V {y - PAD}" stroke="{INK}" stroke-width="2" stroke-dasharray="6 4"/>',
    ]
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">'
    return "\n".join([opening, '<rect width="100%" height="100%" fill="white"/>', *heads, *shapes, "</svg>\n"])


def _rooms(names: list[str], lines: Mapping[str, int], y: int, least: int) -> tuple[list[str], int]:
    """The boxes of a floor's rooms beside each other, and their height, at least as much as is given."""
    width = (CORE - PAD * (len(names) - 1)) // len(names)
    texts = {name: textwrap.wrap(WHAT.get(name, ""), int((width - 2 * PAD) / LETTER)) for name in names}
    height = max(least, LINE * (1 + max(map(len, texts.values()))) + PAD)
    shapes = []
    for number, name in enumerate(names):
        x = LEFT + number * (width + PAD)
        shapes += [_box(x, y, width, height, CORE_FILL), _text(x + PAD, y + LINE, name, INK, 13, bold=True)]
        shapes.append(_lines(x + width - PAD, y + LINE, lines[name]))
        shapes += [_text(x + PAD, y + LINE * (row + 2), text, DIM) for row, text in enumerate(texts[name])]
    return shapes, height


def _parts(parts: Sequence[Part], left: int, y: int, room: int) -> tuple[list[str], int]:
    """The boxes of parts in rows of a width, and their height; one with parts within it takes a row of its own."""
    shapes: list[str] = []
    x, top, height = left, y, LINE + PAD
    for part in parts:
        width = room if part.inner else int(len(part.name) * LETTER) + 60
        if x > left and x + width > left + room:
            x, top, height = left, top + height + PAD // 2, LINE + PAD
        inner, inner_height = _parts(part.inner, x + PAD, top + LINE + PAD, width - 2 * PAD) if part.inner else ([], 0)
        height = max(height, LINE + PAD + inner_height + (PAD if inner else 0))
        shapes += [_box(x, top, width, height, PART_FILL), _text(x + PAD, top + LINE, part.name)]
        shapes += [_lines(x + width - PAD, top + LINE, part.lines), *inner]
        x += width + PAD // 2
    return shapes, top + height - y if parts else 0


def _box(x: int, y: int, width: int, height: int, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{DIM}"/>'


def _text(x: int, y: int, text: str, fill: str = INK, size: int = 12, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}"{weight}>{escape(text)}</text>'


def _lines(x: int, y: int, lines: int, unit: str = "") -> str:
    """A number that ends at x, rounded: to tens, of thousands to hundreds."""
    rounded = round(lines, -1 if lines < 1000 else -2)
    return f'<text class="lines" x="{x}" y="{y}" font-size="12" fill="{DIM}" text-anchor="end">{rounded:,}{unit}</text>'
