"""The hashes of a checkpoint's files find every change."""

import random

import pytest

from rft.setup.assembly import Job
from rft.train.checkpoint.manifest import MANIFEST, damage, describe, files_of, read_manifest, write_manifest

FACTS = {"step": 3, "metric": None}


@pytest.fixture
def sealed(tmp_path):
    """A folder of three files with a manifest."""
    (tmp_path / "actor").mkdir()
    for name, content in {"a.bin": bytes(range(256)), "actor/b.txt": b"text\n", "empty": b""}.items():
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path, {name: describe(tmp_path / name) for name in files_of(tmp_path)}, FACTS)
    return tmp_path


def test_a_whole_checkpoint(sealed):
    assert damage(sealed) is None
    assert read_manifest(sealed)["step"] == 3
    assert list(read_manifest(sealed)["files"]) == ["a.bin", "actor/b.txt", "empty"]


@pytest.mark.slow
def test_every_changed_byte_of_a_checkpoint_of_a_run_is_found(tiny, tmp_path):
    """10,000 changes of one byte in a checkpoint that a run wrote: each file has its share, at least 500 changes."""
    Job(tiny("warmup=none", "steps=1", "eval.every=0")).fit("")
    folder = (tmp_path / "run" / "checkpoints" / "latest").resolve()
    names = [MANIFEST, *files_of(folder)]
    assert {"state.json", "actor/config.json", "actor/model.safetensors"} < set(names)
    assert any(name.startswith("shard-") for name in names) and damage(folder) is None
    draw, changes = random.Random(0), max(500, -(-10_000 // len(names)))
    for name in names:
        with (folder / name).open("r+b", buffering=0) as file:
            size = file.seek(0, 2)
            for _ in range(changes):
                at, bits = draw.randrange(size), draw.randrange(1, 256)
                file.seek(at)
                [byte] = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ bits]))
                assert damage(folder) is not None, (name, at)
                file.seek(at)
                file.write(bytes([byte]))
    assert changes * len(names) >= 10_000 and damage(folder) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: (folder / "a.bin").write_bytes(b""), "a.bin has changed"),
        (lambda folder: (folder / "actor" / "b.txt").unlink(), "actor/b.txt is missing"),
        (lambda folder: (folder / "empty").write_text("x"), "empty has changed"),
        (lambda folder: (folder / MANIFEST).unlink(), f"{MANIFEST} is missing"),
        (lambda folder: (folder / MANIFEST).write_text(""), f"{MANIFEST} cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), f"{MANIFEST} cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text("{}"), f"{MANIFEST} cannot be read"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff"), f"{MANIFEST} cannot be read"),
    ],
)
def test_what_is_wrong_is_named(sealed, change, problem):
    change(sealed)
    assert damage(sealed).startswith(problem)


def test_a_manifest_of_another_version_is_named(sealed):
    """Its hash is right, and it lacks a key."""
    write_manifest(sealed, {}, {"step": 3})
    assert damage(sealed) == f"{MANIFEST} has no key 'metric': another version wrote it"


def test_a_file_beside_those_of_the_checkpoint_is_no_damage(sealed):
    (sealed / "notes.txt").write_text("mine")
    assert damage(sealed) is None


def test_ranks_share_the_files(sealed):
    (sealed / "actor" / "b.txt").write_text("other\n")
    found = [damage(sealed, part, 3) for part in range(3)]
    assert [problem is None for problem in found] == [True, False, True]
