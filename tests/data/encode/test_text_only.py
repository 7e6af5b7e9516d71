"""Rows that need more than text are refused by the name of their field."""

import base64
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from rft.data.encode.masks import conversation
from rft.data.rows.sources import FileRows

PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")


def load(path: Path) -> Any:
    return FileRows(str(path), {}, None, None, "data.train").load(["prompt"])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"image": "a.png"}, "image"),
        ({"images": [{"bytes": "x"}]}, "images"),
        ({"videos": ["a.mp4"]}, "videos"),
        ({"audio": {"path": "a.wav"}}, "audio"),
        ({"agent_name": "tool_agent"}, "agent_name"),
        ({"tools_kwargs": {"calc": {"create_kwargs": {"x": 1}}}}, "tools_kwargs"),
        ({"extra_info": {"tools_kwargs": {"calc": {}}}}, "tools_kwargs"),
        ({"extra_info": {"interaction_kwargs": {"name": "tutor"}}}, "interaction_kwargs"),
    ],
)
def test_a_row_with_more_than_text_is_refused_by_its_field(fields: dict[str, Any], field: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "<image>?"} | more) + "\n" for more in ({}, fields)))
    with pytest.raises(ValueError, match=rf"rows\.jsonl line 2: the field '{field}' .* this version .*; remove the"):
        load(path)


def test_empty_fields_and_a_single_turn_are_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"prompt": "p", "images": [], "audio": None, "agent_name": "single_turn_agent", "extra_info": {"index": 0}}
    path.write_text(json.dumps(row) + "\n")
    assert load(path) == [row]


def test_a_table_of_pictures_is_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    for name, pictures in (("no", [[], None]), ("some", [[], [{"bytes": PIXEL, "path": None}]])):
        table = datasets.Dataset.from_dict({"prompt": ["a", "b"], "images": pictures}, features=features)
        table.to_parquet(tmp_path / f"{name}.parquet")
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *_: pytest.fail("a picture was decoded"))
    assert list(load(tmp_path / "no.parquet")) == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(ValueError, match=r"some\.parquet row 2: the field 'images' is not text"):
        load(tmp_path / "some.parquet")


def test_text_parts_are_joined_and_others_refused_by_their_type() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    [message] = conversation([{"role": "user", "content": parts}], "the prompt")
    assert message == {"role": "user", "content": "a b"}
    for part, kind in (
        ({"type": "image_url", "image_url": {"url": "x"}}, "image_url"),
        ({"type": "input_audio"}, "input_audio"),
        (3, "int"),
    ):
        with pytest.raises(ValueError, match=f"message 0 of the prompt has a content part of type '{kind}', and this"):
            conversation([{"role": "user", "content": [parts[0], part]}], "the prompt")
    with pytest.raises(ValueError, match="the content of message 0 of the prompt is int; write it as a text"):
        conversation([{"role": "user", "content": 5}], "the prompt")
    assert conversation([{"role": "tool", "content": {"sum": 5}}], "the prompt")[0]["content"] == {"sum": 5}
