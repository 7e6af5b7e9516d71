"""Rows with media, as the files of other projects have them, through the yaml of their format."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from rft.data.encode.media.files import open_image
from rft.data.encode.parts import media_of
from rft.data.rows.lazy import Rows, load
from rft.data.rows.sources import LONGEST, FileRows, HubRows, check_text
from rft.registry import Target
from tests.data.media_parts import BLUE, RED, assistant, image, text, user


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two images; the package datasets decodes nothing."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for kind in (datasets.Image, datasets.Audio, datasets.Video):
        monkeypatch.setattr(kind, "decode_example", lambda *_, **__: pytest.fail("a medium was decoded"))
    datasets.disable_progress_bars()
    (tmp_path / "pictures").mkdir()
    for name, data in (("red", RED), ("blue", BLUE)):
        (tmp_path / "pictures" / f"{name}.png").write_bytes(data)
    return tmp_path


def lines(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def train(resolved):
    """The training rows of a data set of the config."""

    def read(name: str, path: str, *overrides: str, fields: tuple[str, ...] = ("prompt",)) -> Rows:
        config = resolved(f"data={name}", f"data.train.path={path}", "data.eval.heldout.path=no", *overrides)
        return load(Target(config["data"]["train"], "data.train", ("key",)), fields)

    return read


GEO3K = {
    "data_source": "hiyouga/geometry3k",
    "prompt": [user("<image>Find x.")],
    "images": [{"bytes": RED, "path": None}],
    "ability": "math",
    "reward_model": {"ground_truth": "3", "style": "rule"},
    "extra_info": {"answer": "3", "index": 0, "question": "<image>Find x.", "split": "train"},
}


@pytest.mark.parametrize("feature", ["image", "struct"])
def test_verls_parquet(feature: str, folder: Path, train) -> None:
    """The rows of geo3k: an image, two, and none; the column is a struct, or an `Image` of the package datasets."""
    two = GEO3K | {"prompt": [user("<image><image>?")], "images": [{"bytes": BLUE}, {"bytes": RED, "path": "a.png"}]}
    none = GEO3K | {"prompt": [user("<image> is a tag")], "images": []}
    table = datasets.Dataset.from_list([GEO3K, two, none])
    if feature == "image":
        table = table.cast_column("images", datasets.List(datasets.Image()))
    table.to_parquet(folder / "rows.parquet")
    rows = train("verl", str(folder / "rows.parquet"), fields=("prompt", "answer"))
    assert [row["prompt"] for row in rows] == [
        [user([image(RED), text("Find x.")])],
        [user([image(BLUE), image(RED), text("?")])],
        [user("<image> is a tag")],
    ]
    assert [row["answer"] for row in rows] == ["3"] * 3
    assert rows[0].keys() == GEO3K.keys() - {"images"} | {"answer"}
    [(_, value)] = media_of(rows[0]["prompt"])
    assert open_image(value).getpixel((0, 0)) == (255, 0, 0)
    stream = FileRows(str(folder / "rows.parquet"), {}, None, None, "data.train").stream(["prompt"])
    assert [row["prompt"] for row in stream.preview()] == [row["prompt"] for row in rows]


def test_trls_jsonl_with_relative_paths(folder: Path, train, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (str(folder / "pictures" / f"{name}.png") for name in ("red", "blue"))
    rows = [
        {
            "images": ["pictures/red.png", "pictures/blue.png"],
            "messages": [user([{"type": "image"}, text("a"), {"type": "image"}]), assistant([text("b")])],
        },
        {"images": ["pictures/red.png"], "prompt": [user("a")], "completion": [assistant("b")]},
        {"image": "pictures/red.png", "prompt": "a", "completion": "b"},
        {"messages": [user("a"), assistant("b")]},
    ]
    path = lines(folder, rows)
    monkeypatch.chdir(folder.parent)
    for place in (path, f"{folder.name}/rows.jsonl", f"{folder.name}/*.jsonl"):
        first, second, third, fourth = train("trl", place, fields=("prompt", "response"))
        assert first["prompt"] == [user([image(one), text("a"), image(other)])]
        assert first["messages"] == [*first["prompt"], *first["response"]]
        assert second["prompt"] == third["prompt"] == [user([image(one), text("a")])]
        assert third["response"] == "b" and fourth["prompt"] == [user("a")]
        assert not any(row.keys() & {"image", "images"} for row in (first, second, third, fourth))


def test_trls_pairs(folder: Path, train) -> None:
    """The prompt is what both answers begin with."""
    asked = user([{"type": "image"}, text("a")])
    pair = {"chosen": [asked, assistant("b")], "rejected": [asked, assistant("c")], "images": ["pictures/red.png"]}
    [row] = train("trl", lines(folder, [pair]), fields=("prompt", "chosen", "rejected"))
    assert row == {
        "prompt": [user([image(str(folder / "pictures" / "red.png")), text("a")])],
        "chosen": [assistant("b")],
        "rejected": [assistant("c")],
    }


def test_llavas_conversations(folder: Path, train) -> None:
    said = [{"from": "human", "value": "<image>\na"}, {"from": "gpt", "value": "b"}]
    path = lines(folder, [{"image": "pictures/red.png", "conversations": said}, {"conversations": said}])
    row, plain = train("sharegpt", path, fields=("prompt", "response"))
    asked = user([image(str(folder / "pictures" / "red.png")), text("\na")])
    assert row == {"messages": [asked, assistant("b")], "prompt": [asked], "response": [assistant("b")]}
    assert plain["prompt"] == [user("<image>\na")]


@pytest.mark.parametrize("name", ["image", "pics"])
def test_media_of_another_name_are_in_the_row_once(name: str, folder: Path) -> None:
    path = lines(folder, [{"prompt": "a", name: ["pictures/red.png", "pictures/blue.png"]}])
    [row] = FileRows(path, {"images": name}, None, None, "data.train").load(["prompt"])
    assert row.keys() == {"prompt"} and len(media_of(row["prompt"])) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["pictures/green.png"]}, r"'images': there is no file .*/pictures/green\.png; correct"),
        ({"images": ["https://a.b/c.png"]}, "'images': 'https://a.b/c.png' is not a local file.*; download it first"),
        ({"prompt": "<image><image>", "images": ["pictures/red.png"]}, "'images': it has 1 media, .* has 2 places"),
    ],
)
def test_a_mistake_names_file_and_line(row: dict[str, Any], message: str, folder: Path) -> None:
    rows = FileRows(lines(folder, [{"prompt": "a"}, {"prompt": "a"} | row]), {}, None, None, "data.train")
    with pytest.raises(ValueError, match=rf"^.*rows\.jsonl line 2: the field {message}"):
        rows.load(["prompt"])
    with pytest.raises(ValueError, match=rf"^.*rows\.jsonl line 2: the field {message}"):
        rows.stream(["prompt"]).preview()


def test_a_data_set_with_media(folder: Path) -> None:
    """Of a folder of `save_to_disk`, and of parquet files, which are streamed too."""
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    table = datasets.Dataset.from_dict(
        {"prompt": ["a<image>", "b"], "image": [{"bytes": RED}, None]}, features=features
    )
    table.to_parquet(folder / "table" / "train.parquet")
    table.save_to_disk(folder / "saved")
    expected = [{"prompt": [user([text("a"), image(RED)])]}, {"prompt": "b"}]
    for name, split in (("table", "train"), ("saved", None)):
        rows = HubRows(str(folder / name), None, split, {}, None, None, "data.train")
        assert list(rows.load(["prompt"])) == expected
        assert list(rows.stream(["prompt"]).preview()) == expected


def test_paths_in_a_data_set_begin_at_its_folder(folder: Path) -> None:
    table = datasets.Dataset.from_list([{"prompt": "a", "image": "pictures/red.png"}])
    table.to_parquet(folder / "train.parquet")
    for rows in (
        HubRows(str(folder), None, "train", {}, None, None, "data.train"),
        HubRows(str(folder / "train.parquet"), None, None, {}, None, None, "data.train"),
    ):
        [row] = rows.load(["prompt"])
        assert media_of(row["prompt"]) == [("image", str(folder / "pictures" / "red.png"))]


def test_the_check_of_texts_takes_media() -> None:
    large = {"type": "audio", "audio": b"x" * (LONGEST + 1)}
    check_text([user([image("/a.png")])], "prompt", "here", "")
    check_text([user([large, text("a")])], "prompt", "here", "")
    with pytest.raises(ValueError, match=rf"^here: the field 'prompt' has {LONGEST + 1:,} characters, over"):
        check_text([user([large, text("a" * (LONGEST + 1))])], "prompt", "here", "")
    with pytest.raises(ValueError, match=r"^here: message 0 of the field 'prompt' has a content part of type 'image' "):
        check_text([user([{"type": "image"}])], "prompt", "here", "")
