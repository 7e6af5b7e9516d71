"""Which folders are checkpoints, and of which steps."""

from rft.train.checkpoint.names import checkpoints_in, name_of, step_of


def test_the_folders_that_are_checkpoints(tmp_path):
    names = ("step_00000010", "step_00000002", "damaged_step_00000003", "step_00000004.partial", "step_5", "latest")
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000006").write_text("a file")
    found = checkpoints_in(tmp_path)
    assert [step_of(path) for path in found] == [2, 10]
    assert [path.name for path in found] == [name_of(2), name_of(10)]
    assert checkpoints_in(tmp_path / "nowhere") == []
