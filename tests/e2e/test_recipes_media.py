"""The recipes with images and audio: rows of a parquet file and generated ones, and short runs of the CPU settings."""

import importlib.util
import io
import json
import math
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import rft
from rft.data.encode.media.files import open_image
from rft.data.encode.parts import media_of
from rft.data.rows.sources import FileRows
from rft.setup.assembly import Job
from tests.families import picture

RECIPES = Path(rft.__file__).parent.parent / "recipes"
WITH_MEDIA = {
    "geo3k": ("run", "cpu"),
    "vision_reward": ("scalar", "generative", "cpu_scalar", "cpu_generative"),
    "audio_qa": ("run", "cpu"),
}
SCRIPTS = {"geo3k": "geo3k", "vision_reward": "vision_pairs", "audio_qa": "audio_qa"}  # prepare_<name>.py, data/<name>
SMALL = {
    "geo3k": ("warmup.steps=1", "warmup.rows=8", "algorithm.group_size=4"),
    "audio_qa": ("warmup.steps=1", "warmup.rows=8", "algorithm.group_size=4"),
    "vision_reward": (),
}


def prepare(recipe, *words):
    """Runs the script of a recipe in the current folder, as its command does."""
    file = RECIPES / recipe / f"prepare_{SCRIPTS[recipe]}.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = Path("data") / SCRIPTS[recipe]
    module.main([str(folder), *map(str, words)])
    return folder


def rows_in(file, *fields):
    return FileRows(str(file), {}, None, None, "rows").load([*fields])


def png(number):
    picture(number).save(file := io.BytesIO(), "png")
    return file.getvalue()


@pytest.mark.parametrize(("recipe", "name"), [(recipe, name) for recipe, names in WITH_MEDIA.items() for name in names])
def test_a_setting_composes(recipe, name, resolved):
    config = resolved(folder=RECIPES / recipe, name=name)
    job = Job(config)
    assert job.processor is not None and config["metric"] == "eval/test/accuracy"
    assert job.actor.options.head == ("score" if "scalar" in name else "lm")


def test_the_parquet_files_of_geometry3k_become_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    columns = {
        "images": [
            [{"bytes": png(0), "path": None}],
            [{"bytes": png(1), "path": None}, {"bytes": png(2), "path": "x"}],
        ],
        "problem": ["<image>Find x.", "Is <image> or <image> larger?"],
        "answer": ["3", "\\sqrt{2}"],
    }
    for name in ("a", "b"):
        pyarrow.parquet.write_table(pyarrow.table(columns), f"{name}.parquet")
    folder = prepare("geo3k", "--parquet", "a.parquet", "b.parquet")
    for name in ("train", "test"):
        first, second = rows_in(folder / f"{name}.jsonl", "prompt", "answer")
        assert first.keys() == {"prompt", "answer"} and second["answer"] == "\\sqrt{2}"
        assert [part.get("text") for part in second["prompt"][0]["content"]] == ["Is ", None, " or ", None, " larger?"]
        for number, (_, file) in enumerate(media_of(first["prompt"]) + media_of(second["prompt"])):
            assert Path(file).read_bytes() == png(number)


def test_the_parquet_files_of_rlaif_v_become_pairs_whose_questions_are_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count = 120
    columns = {
        "image": [{"bytes": png(0), "path": "x.jpg"}] * count,
        "question": [f"question {number}" for number in range(count)],
        "chosen": ["good"] * count,
        "rejected": ["bad"] * count,
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), "pairs.parquet")
    folder = prepare("vision_reward", "--parquet", "pairs.parquet")
    asked = {}
    for name in ("train", "test"):
        rows = list(rows_in(folder / f"{name}.jsonl", "prompt", "chosen", "rejected"))
        assert all(row.keys() == {"prompt", "chosen", "rejected"} for row in rows)
        asked[name] = {row["prompt"][0]["content"][1]["text"] for row in rows}
        assert np.array_equal(open_image(media_of(rows[0]["prompt"])[0][1]), picture(0))
    assert asked["train"] | asked["test"] == {*columns["question"]} and not asked["train"] & asked["test"]
    assert 0 < len(asked["test"]) < 10


def test_a_parquet_file_of_questions_about_sounds_becomes_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = prepare("audio_qa", "--generated", 8)
    sounds = sorted((folder / "train").glob("*.wav"))
    columns = {
        "audio": [{"bytes": file.read_bytes(), "path": "x.wav"} for file in sounds],
        "question": ["what?"] * 8,
        "answer": ["rain"] * 8,
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), "a.parquet")
    again = tmp_path / "again"
    again.mkdir()
    monkeypatch.chdir(again)
    folder = prepare("audio_qa", "--parquet", tmp_path / "a.parquet", tmp_path / "a.parquet")
    for row, file in zip(rows_in(folder / "test.jsonl", "prompt", "answer"), sounds, strict=True):
        assert Path(media_of(row["prompt"])[0][1]).read_bytes() == (tmp_path / file).read_bytes()


def test_generated_problems_are_right_and_different(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = prepare("geo3k", "--generated", 64)
    train, test = (list(rows_in(folder / f"{name}.jsonl", "prompt", "answer")) for name in ("train", "test"))
    seen = []
    for row in [*train, *test]:
        [(_, file)] = media_of(row["prompt"])
        lit = np.asarray(open_image(file)).any(2)
        axis = 0 if row["prompt"][0]["content"][1]["text"] == "find the width" else 1
        assert lit.any(axis).sum() == 8 * int(row["answer"])
        seen.append((axis, Path(file).read_bytes()))
    assert (len(train), len(test), len({*seen})) == (64, 8, 72)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "name"),
    [("geo3k", "cpu"), ("vision_reward", "cpu_scalar"), ("vision_reward", "cpu_generative"), ("audio_qa", "cpu")],
)
def test_a_cpu_setting_trains_on_generated_rows(recipe, name, resolved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(recipe, "--generated", 32)
    config = resolved("steps=1", "batch.prompts=4", *SMALL[recipe], folder=RECIPES / recipe, name=name)
    Job(config).fit("")
    logged = [json.loads(line) for line in Path(config["output_dir"], "metrics.jsonl").read_text().splitlines()]
    numbers = {key: value for row in logged for key, value in row.items() if isinstance(value, float)}
    assert numbers["eval/test/accuracy"] >= 0 and all(map(math.isfinite, numbers.values()))
    losses = {"cpu_scalar": "loss/bradley_terry", "cpu_generative": "loss/nll", "cpu": "reward/exact_match"}
    assert losses[name] in numbers
