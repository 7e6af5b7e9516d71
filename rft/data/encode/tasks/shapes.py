"""The built-in visual task: images of one to four coloured shapes, and questions about them."""

import random
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from rft.conditions import ReadWith
from rft.data.encode.tasks.generated import Asked, MediaRows, Split, following, in_split
from rft.ranges import Fraction, Range, Seed

KINDS = ("square", "triangle", "cross")
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}
CORNERS = ("top left", "top right", "bottom left", "bottom right")
COUNTS = ("0", "1", "2", "3")
ORDINALS = ("first", "second", "third", "fourth")
STEP = 8  # a side is a multiple of it
Shape = tuple[int, str, str]  # index of the corner, kind, colour
Picture = tuple[int, tuple[tuple[Shape, int, int], ...]]  # pixels of a side; shapes, with pixels from the cell's corner
Pictures = Annotated[int, Range(low=1, high=len(ORDINALS))]
Side = Annotated[int, Range(low=16, high=1024)]


@dataclass
class Shapes(MediaRows):
    """Rows about black images with shapes in their corners: "cross colour?", "blue".

    The questions are about the colour of a shape, the number of shapes of a colour (0 to 3) and the corner of the only
    shape of a colour. With several images they begin with the number of an image, "second: how many red?", and a
    fourth question asks which of the images has a colour. The answers to a question are equally frequent: chance is
    1/4, and 1/(number of images) for the fourth question.

    A row has the fields of `Symbolic`, without `text`. Its prompt is one message of the user, whose content is the
    images and the question. Each character of an answer is a step for process rewards. Pixels depend on the options
    and the seed alone.

    Args:
        key: supplied by the run: the yaml key.
        split: training images or held-out ones (one in ten, by the checksum of their shapes).
        count: number of rows, all different.
        questions: the questions, which are equally frequent.
        images: fewest and most images of a row.
        size: shortest and longest side of an image in pixels; multiples of 8.
        slips: share of the demonstrations that name a wrong answer after the right one.
        seed: seed of the random shapes.

    Raises:
        ValueError: a range is empty, a size is not a multiple of 8, or there are no questions or too few images.
    """

    key: str
    split: Split
    count: Annotated[int, Range(low=1, high=1_000_000)]
    questions: list[Literal["colour", "count", "position", "which"]]
    images: tuple[Pictures, Pictures]
    size: tuple[Side, Side]
    slips: Annotated[Fraction, ReadWith("field demonstration")]
    seed: Seed

    def __post_init__(self) -> None:
        key, images, size = self.key, self.images, self.size
        for name, (low, high) in (("images", images), ("size", size)):
            if low > high:
                raise ValueError(f"{key}.{name}={[low, high]}: put the smaller number first")
        if size[0] % STEP or size[1] % STEP:
            raise ValueError(f"{key}.size={list(size)}: give multiples of {STEP}")
        if not self.questions:
            raise ValueError(f"{key}.questions is empty: name colour, count, position or which")
        if "which" in self.questions and images[0] < 2:
            raise ValueError(f"{key}.images={list(images)}: the question `which` compares images; set [2, 2]")

    def ask(self, rng: random.Random) -> Asked:
        kind = rng.choice(self.questions)
        images = rng.randint(*self.images)
        ordinals = ORDINALS[:images]
        answers = {"colour": tuple(COLOURS), "count": COUNTS, "position": CORNERS, "which": ordinals}[kind]
        answer = rng.choice(answers)
        about = ordinals.index(answer) if kind == "which" else rng.randrange(images)
        shape, colour = rng.choice(KINDS), rng.choice(list(COLOURS))
        while True:
            asked = _drawn(rng, kind, shape, colour, answer)
            without = _without(KINDS, ""), _without(COLOURS, colour if kind == "which" else "")
            scenes = [asked if n == about else _others(rng, range(4), 1, *without) for n in range(images)]
            if in_split(scenes, self.split):  # drawn again with the same answer: answers stay equally frequent
                break
        texts = {
            "colour": f"{shape} colour?",
            "count": f"how many {colour}?",
            "position": f"where is {colour}?",
            "which": f"which has {colour}?",
        }
        before = f"{ordinals[about]}: " if images > 1 and kind != "which" else ""
        media = tuple(self._placed(rng, scene) for scene in scenes)
        return Asked(media, before + texts[kind], answer, following(answers, answer))

    def _placed(self, rng: random.Random, scene: list[Shape]) -> Picture:
        """The image of a scene: each shape has a random place in its quarter."""
        side = rng.randrange(self.size[0], self.size[1] + 1, STEP)
        room = side // 2 - _extent(side)
        return side, tuple((shape, rng.randint(0, room), rng.randint(0, room)) for shape in scene)

    def parts(self, media: tuple[Picture, ...]) -> list[dict[str, Any]]:
        from PIL import Image

        return [{"type": "image", "image": Image.fromarray(_pixels(*picture))} for picture in media]


def _drawn(rng: random.Random, kind: str, shape: str, colour: str, answer: str) -> list[Shape]:
    """The shapes of the image that a question is about; sorted, so that equal images have equal checksums."""
    corners = rng.sample(range(4), 4)
    if kind == "colour":
        asked = [(corners.pop(), shape, answer)]
        return sorted(asked + _others(rng, corners, 1, _without(KINDS, shape), list(COLOURS)))
    if kind == "which":
        asked = [(corners.pop(), rng.choice(KINDS), colour)]
        return sorted(asked + _others(rng, corners, 0, list(KINDS), list(COLOURS)))
    if kind == "position":
        corners.remove(CORNERS.index(answer))
        asked = [(CORNERS.index(answer), rng.choice(KINDS), colour)]
    else:
        asked = [(corners.pop(), rng.choice(KINDS), colour) for _ in range(int(answer))]
    fewest = 0 if kind == "count" and asked else 1
    return sorted(asked + _others(rng, corners, fewest, list(KINDS), _without(COLOURS, colour)))


def _others(rng: random.Random, corners: Any, fewest: int, kinds: list[str], colours: list[str]) -> list[Shape]:
    """Shapes in some of the corners."""
    free = list(corners)
    chosen = rng.sample(free, rng.randint(fewest, len(free)))
    return sorted((corner, rng.choice(kinds), rng.choice(colours)) for corner in chosen)


def _without(values: Any, value: str) -> list[str]:
    return [other for other in values if other != value]


def _extent(side: int) -> int:
    """Pixels of a side of a shape."""
    return side // 2 * 3 // 4


def _pixels(side: int, shapes: tuple[tuple[Shape, int, int], ...]) -> np.ndarray:
    """The pixels of an image, 8-bit RGB (side, side, 3). Each of a shape's pixels has its colour: no antialiasing."""
    pixels = np.zeros((side, side, 3), np.uint8)
    extent, cell = _extent(side), side // 2
    y, x = np.mgrid[:extent, :extent]
    across, down = 2 * x - extent + 1, 2 * y - extent + 1  # twice the distance from the middle
    covers = {
        "square": np.ones((extent, extent), bool),
        "triangle": abs(across) <= y,
        "cross": np.minimum(abs(across), abs(down)) <= extent // 3,
    }
    for (corner, kind, colour), right, below in shapes:
        top, left = corner // 2 * cell + below, corner % 2 * cell + right
        pixels[top : top + extent, left : left + extent][covers[kind]] = COLOURS[colour]
    return pixels
