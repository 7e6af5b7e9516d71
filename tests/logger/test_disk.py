"""A name leads to content that is on the disk, and is on the disk itself."""

import pytest

from rft.logger.disk import make_folder, replacing


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
