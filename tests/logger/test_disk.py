"""A name leads to content that is on the disk, and is on the disk itself; records wait for space on the disk."""

import resource
import shutil
from contextlib import contextmanager

import pytest

from rft.logger import disk
from rft.logger.disk import HeldFolder, Records, append, make_folder, replacing

LIMIT = 200_000  # bytes of a file


@contextmanager
def full_disk():
    """A file can have no more than `LIMIT` bytes, so the disk is full for a file that has as many."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_is_synced_before_it_gets_its_name_and_the_name_after(tmp_path, disk_calls):
    with replacing(tmp_path / "file") as partial:
        partial.write_text("new")
        assert disk_calls == []
    assert (tmp_path / "file").read_text() == "new"
    assert disk_calls == [
        ("sync", str(tmp_path / ".file.partial")),
        ("rename", str(tmp_path / "file")),
        ("sync", str(tmp_path)),
    ]


def test_a_block_that_fails_leaves_the_old_file(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "file") as partial:
        partial.write_text("half")
        raise ZeroDivisionError
    assert (tmp_path / "file").read_text() == "old"


def test_every_folder_that_is_made_is_synced_in_the_one_around_it(tmp_path, disk_calls):
    make_folder(tmp_path / "a" / "b")
    made = [path for call, path in disk_calls if call == "mkdir"]
    assert set(made) >= {str(tmp_path / "a"), str(tmp_path / "a" / "b")}
    assert disk_calls[-2:] == [("sync", str(tmp_path)), ("sync", str(tmp_path / "a"))]
    disk_calls.clear()
    make_folder(tmp_path / "a" / "b")
    assert [call for call, _ in disk_calls if call == "sync"] == []


def test_the_error_of_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with full_disk(), pytest.raises(OSError, match=rf"File too large: '{file}'"), replacing(file) as partial:
        partial.write_text("x" * (LIMIT + 1))
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and file.read_text() == "old"


def test_what_is_appended_is_on_the_disk_and_so_is_the_name_of_a_new_file(tmp_path, disk_calls):
    append(tmp_path / "file", b"one\n")
    assert disk_calls == [("sync", str(tmp_path)), ("sync", str(tmp_path / "file"))]
    append(tmp_path / "file", b"two\n")
    assert disk_calls[2:] == [("sync", str(tmp_path / "file"))]
    assert (tmp_path / "file").read_text() == "one\ntwo\n"


def test_of_what_does_not_fit_no_part_stays(tmp_path):
    file, before = tmp_path / "file", b"x" * (LIMIT - 2)
    file.write_bytes(before)
    with full_disk(), pytest.raises(OSError, match=rf"File too large: '{file}'"):
        append(file, b"four")
    assert file.read_bytes() == before


@pytest.fixture
def records():
    found = Records(lambda text: found.warnings.append(text))
    found.warnings = []
    return found


def test_records_wait_for_space_and_keep_their_order(tmp_path, records):
    file, other = tmp_path / "file", tmp_path / "texts" / "step"
    file.write_bytes(b"x" * LIMIT)
    with full_disk():
        records.append(file, "1\n")
        records.append(file, "2\n")
        records.replace(other, "text")
        assert not other.exists() and records.flush() == f"[Errno 27] File too large: '{file}'"
    assert records.warnings == [
        f"[Errno 27] File too large: '{file}': records wait in memory, and are written once that is possible"
    ]
    records.append(file, "3\n")
    assert file.read_text()[LIMIT:] == "1\n2\n3\n" and other.read_text() == "text" and records.flush() == ""
    with full_disk():
        records.append(file, "4\n")
    assert len(records.warnings) == 2, "the disk was full a second time"


def test_too_many_records_that_wait_are_dropped_the_oldest_first(tmp_path, records, monkeypatch):
    monkeypatch.setattr(disk, "MOST_WAITING", 4)
    file = tmp_path / "gone" / "file"
    for text in ("1\n", "2\n", "3\n", "4\n"):
        records.append(file, text)
    assert [text.rpartition(": ")[2] for text in records.warnings] == [
        "records wait in memory, and are written once that is possible",
        f"too many records wait in memory; those of {file} are lost",
    ]
    assert not file.parent.exists(), "the folder of a run is not made again"
    file.parent.mkdir()
    assert records.flush() == "" and file.read_text() == "3\n4\n"


def test_a_warning_about_records_may_be_a_record(tmp_path):
    records = Records(lambda text: records.append(tmp_path / "warnings", f"{text}\n"))
    (tmp_path / "file").write_bytes(b"x" * LIMIT)
    with full_disk():
        records.append(tmp_path / "file", "1\n")
    assert records.flush() == "" and "records wait in memory" in (tmp_path / "warnings").read_text()


@pytest.mark.parametrize("then", ["nothing", "removed", "renamed", "replaced"])
def test_a_held_folder_is_known_by_more_than_its_name(tmp_path, then):
    folder = tmp_path / "run"
    folder.mkdir()
    held = HeldFolder(folder)
    if then == "removed":
        shutil.rmtree(folder)
    elif then != "nothing":
        folder.rename(tmp_path / "other")
    if then == "replaced":
        folder.mkdir()
    assert held.moved() == (then != "nothing")
    held.close()
