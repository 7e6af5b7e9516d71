"""The built-in visual task. Answers are found again from the pixels alone."""

import hashlib
from collections import Counter

import numpy as np
import pytest
from omegaconf import OmegaConf

from rft.data.encode.tasks.shapes import Shapes
from tests.helpers import CONFIG

ALL = ("colour", "count", "position")
COLOURS = {(255, 0, 0): "red", (0, 255, 0): "green", (0, 0, 255): "blue", (255, 255, 0): "yellow"}
CORNERS = {(0, 0): "top left", (0, 1): "top right", (1, 0): "bottom left", (1, 1): "bottom right"}
ORDINALS = ["first", "second", "third", "fourth"]


def load(split="train", count=200, questions=ALL, images=(1, 1), size=(32, 32), slips=0.5, seed=0, required=()):
    return Shapes("data.train", split, count, list(questions), images, size, slips, seed).load(list(required))


def images_of(row):
    return [np.asarray(part["image"]) for part in row["prompt"][0]["content"] if part["type"] == "image"]


def question_of(row):
    return row["prompt"][0]["content"][-1]["text"]


def shape_of(covered):
    """The kind of a shape: a square fills its first row, a triangle only its last one, and a cross neither."""
    rows, columns = np.any(covered, 1).nonzero()[0], np.any(covered, 0).nonzero()[0]
    box = covered[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    if box[0].all():
        return "square"
    return "triangle" if box[-1].all() else "cross"


def shapes_in(pixels):
    """(corner, kind, colour) of each shape of an image."""
    assert pixels.dtype == np.uint8 and pixels.shape[0] == pixels.shape[1] and pixels.shape[2] == 3
    half, found = len(pixels) // 2, []
    for place, corner in CORNERS.items():
        cell = pixels[place[0] * half : (place[0] + 1) * half, place[1] * half : (place[1] + 1) * half]
        covered = cell.any(2)
        if covered.any():
            [colour] = {tuple(int(value) for value in pixel) for pixel in cell[covered]}
            found.append((corner, shape_of(covered), COLOURS[colour]))
    return found


def right(row):
    """The answers that the images of a row allow."""
    scenes, question = [shapes_in(pixels) for pixels in images_of(row)], question_of(row).removesuffix("?")
    ordinal, colon, rest = question.partition(": ")
    assert bool(colon) == (len(scenes) > 1 and not question.startswith("which has "))
    scene, asked = (scenes[ORDINALS.index(ordinal)], rest) if colon else (scenes[0], question)
    if asked.startswith("which has "):
        return [ORDINALS[n] for n, some in enumerate(scenes) if asked.split()[-1] in [colour for _, _, colour in some]]
    if asked.endswith(" colour"):
        return [colour for _, kind, colour in scene if kind == asked.split()[0]]
    if asked.startswith("where is "):
        return [corner for corner, _, colour in scene if colour == asked.split()[-1]]
    assert asked.startswith("how many ")
    return [str(sum(colour == asked.split()[-1] for _, _, colour in scene))]


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize(
    ("images", "size", "questions"),
    [((1, 1), (32, 32), ALL), ((2, 4), (16, 56), (*ALL, "which")), ((1, 3), (40, 40), ("position",))],
)
def test_answers_are_right(split, images, size, questions):
    rows = load(split, count=100, images=images, size=size, questions=questions)
    assert len(rows) == 100
    for row in rows:
        assert right(row) == [row["answer"]] == [row["response"]]
        assert row["chosen"] == row["answer"] != row["rejected"]
        assert row["demonstration"] in (row["answer"], f"{row['chosen']} or {row['rejected']}")
        assert row["completion"] == row["chosen" if row["label"] else "rejected"]
        assert "".join(row["completions"]) == row["completion"]
        steps = [row["answer"].startswith(row["completion"][:end]) for end in range(1, len(row["completion"]) + 1)]
        assert row["labels"] == steps and all(steps) == row["label"]
        scenes = [shapes_in(pixels) for pixels in images_of(row)]
        assert all(1 <= len(scene) <= 4 for scene in scenes)
        assert all(size[0] <= len(pixels) <= size[1] and len(pixels) % 8 == 0 for pixels in images_of(row))
    assert 35 < sum(row["label"] for row in rows) < 65
    assert {len(images_of(row)) for row in rows} == set(range(images[0], images[1] + 1))


def test_all_sizes_occur():
    assert {len(images_of(row)[0]) for row in load(size=(16, 48))} == {16, 24, 32, 40, 48}


def test_pixels_are_the_same_on_every_machine():
    digest = hashlib.sha256()
    for row in load(count=50, images=(1, 2), size=(24, 40)):
        for pixels in images_of(row):
            digest.update(pixels.tobytes())
        digest.update(f"{question_of(row)}{row['answer']}{row['demonstration']}".encode())
    assert digest.hexdigest() == "0fa51068728cc04d51423e2122cc92ff74201790630061f6fe552b45b97e4dc2"


def test_a_row_is_the_same_whenever_it_is_read():
    rows, again, other = load(seed=4), load(seed=4), load(seed=5)

    def content(row):
        return question_of(row), row["answer"], images_of(row)[0].tobytes()

    assert [content(row) for row in rows] == [content(row) for row in rows] == [content(row) for row in again]
    assert [content(row) for row in rows] != [content(row) for row in other]


@pytest.mark.parametrize("images", [(1, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_train_and_held_out_share_no_image(images):
    """Nor images that differ only in the places of the shapes within their corners."""

    def scenes(split, count, seed):
        rows = load(split, count, images=images, seed=seed)
        return {str([shapes_in(pixels) for pixels in images_of(row)]) for row in rows}

    assert not scenes("train", 600, 0) & scenes("heldout", 150, 0)


def test_rows_are_different():
    rows = load(count=600)
    assert len({(question_of(row), images_of(row)[0].tobytes()) for row in rows}) == 600


@pytest.mark.parametrize("split", ["train", pytest.param("heldout", marks=pytest.mark.slow)])
def test_answers_to_a_question_are_equally_frequent(split):
    """Also to one that names a colour or a shape: an answer without a look at the image is right in 1 of 4 rows."""
    rows = load(split, count=3000)
    answers = {}
    for row in rows:
        answers.setdefault(question_of(row), Counter())[row["answer"]] += 1
    assert len(answers) == 3 + 4 + 4
    for counts in answers.values():
        total = sum(counts.values())
        assert len(counts) == 4
        assert all(abs(count / total - 0.25) < 4 * (0.25 * 0.75 / total) ** 0.5 for count in counts.values())
    for word in ("colour", "how", "where"):
        assert abs(sum(word in question_of(row) for row in rows) / 3000 - 1 / 3) < 0.04


def test_slips_are_the_share_of_demonstrations_with_two_answers():
    def wrong(slips):
        rows = load(count=2000, slips=slips)
        return sum(row["demonstration"] != row["answer"] for row in rows) / len(rows)

    assert wrong(0.0) == 0.0
    assert wrong(1.0) == 1.0
    assert abs(wrong(0.6) - 0.6) < 0.05  # four standard errors of 2,000 draws


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"images": (2, 1)}, r"^data\.train\.images=\[2, 1\]: put the smaller number first$"),
        ({"size": (40, 32)}, r"^data\.train\.size=\[40, 32\]: put the smaller number first$"),
        ({"size": (20, 32)}, r"^data\.train\.size=\[20, 32\]: give multiples of 8$"),
        ({"size": (16, 30)}, r"^data\.train\.size=\[16, 30\]: give multiples of 8$"),
        ({"questions": ()}, r"^data\.train\.questions is empty"),
        ({"questions": ("which",)}, r"^data\.train\.images=\[1, 1\]: the question `which` compares images"),
        ({"questions": ("which",), "images": (1, 3)}, r"^data\.train\.images=\[1, 3\]: the question `which`"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        load(**options)


def test_a_field_that_the_task_does_not_have():
    with pytest.raises(ValueError, match=r"^data\.train: the built-in tasks have no field 'rationale'"):
        load(required=("prompt", "rationale"))


@pytest.mark.parametrize("name", ["shapes", "shapes_several"])
def test_the_alphabet_of_the_tiny_model_has_every_character(name):
    data = OmegaConf.load(CONFIG / "data" / f"{name}.yaml").train
    alphabet = OmegaConf.load(CONFIG / "actor" / "tiny_vision.yaml").tokenizer.alphabet
    rows = load(count=600, questions=data.questions, images=tuple(data.images))
    texts = [text for row in rows for text in (question_of(row), row["answer"], row["rejected"], row["demonstration"])]
    assert set("".join(texts)) <= set(alphabet)
    others = set(CORNERS.values()) if name == "shapes" else {"first", "second"}
    assert {row["answer"] for row in rows} == {*COLOURS.values(), *"0123", *others}
