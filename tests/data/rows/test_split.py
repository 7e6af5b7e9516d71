"""Shares of rows and rows without others go by content: every process that reads them, in any order, gets the same."""

import json

import pytest

from rft.data.rows.split import ExcludeRows, HashSplit

MESSAGES = [[{"role": "user", "content": f"{n}?"}] for n in range(20)]


def file(folder, rows, name="rows"):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "_target_": "rft.data.rows.sources.FileRows",
        "path": str(path),
        "columns": {},
        "schema": None,
        "limit": None,
    }


def share(node, start, end):
    return list(HashSplit(node, "prompt", [start, end], "data.train").load(["n"]))


def test_shares_are_disjoint_complete_and_keep_what_belongs_together(tmp_path):
    rows = [{"prompt": f"{n % 100}=", "n": n} for n in range(400)]
    node = file(tmp_path, rows)
    first, second = share(node, 0.0, 0.75), share(node, 0.75, 1.0)
    assert sorted(first + second, key=lambda row: row["n"]) == rows
    assert [row["n"] for row in first] == sorted(row["n"] for row in first)
    assert not {row["prompt"] for row in first} & {row["prompt"] for row in second}
    assert len(first) == 4 * len({row["prompt"] for row in first}) and 240 < len(first) < 360
    again = share(file(tmp_path, rows[::-1], "turned"), 0.0, 0.75)
    assert again == first[::-1], "a row's place or its neighbours must not matter"


def test_a_share_is_that_of_the_hash(tmp_path):
    """`printf '"a"' | b2sum -l 48` says d4573fd2d6d6."""
    node = file(tmp_path, [{"prompt": "a", "n": 0}])
    place = 0xD4573FD2D6D6 / 2**48
    assert share(node, place, 1.0) == share(node, 0.0, place + 1e-9) == [{"prompt": "a", "n": 0}]
    with pytest.raises(ValueError, match=r"^data\.train\.share=\[0\.0, .*\] leaves none of 1 rows; widen it$"):
        share(node, 0.0, place)


def test_messages_have_a_share_too(tmp_path):
    node = file(tmp_path, [{"prompt": messages, "n": n} for n, messages in enumerate(MESSAGES)])
    numbers = [row["n"] for part in ((0.0, 0.5), (0.5, 1.0)) for row in share(node, *part)]
    assert sorted(numbers) == list(range(20)) != numbers


@pytest.mark.parametrize("wrong", [[0.5], [0.5, 0.5], [0.7, 0.2], [-0.1, 0.5], [0.5, 1.5]])
def test_what_is_no_share_is_refused(wrong, tmp_path):
    with pytest.raises(ValueError, match=r"^data\.train\.share=\[.*\]: give its start and end between 0 and 1"):
        HashSplit(file(tmp_path, []), "prompt", wrong, "data.train")


def test_rows_without_others(tmp_path):
    rows = [{"prompt": messages, "n": n} for n, messages in enumerate(MESSAGES)]
    turned = [{"prompt": [dict(reversed(turn.items())) for turn in MESSAGES[n]]} for n in (3, 17)]  # keys in any order
    whole, some = file(tmp_path, rows), file(tmp_path, turned, "some")
    left = rows[:3] + rows[4:17] + rows[18:]
    assert list(ExcludeRows(whole, some, "prompt", None, "data.eval.x").load(["n"])) == left
    assert list(ExcludeRows(whole, some, "prompt", 5, "data.eval.x").load(["n"])) == left[:5]
    with pytest.raises(ValueError, match=r"^data\.eval\.x: all of them are among the 20 of data\.eval\.x\.others"):
        ExcludeRows(some, whole, "prompt", None, "data.eval.x").load([])
    with pytest.raises(ValueError, match=r"^data\.eval\.x: none of them is among the 1 of data\.eval\.x\.others"):
        ExcludeRows(whole, file(tmp_path, [{"prompt": "3?"}], "alien"), "prompt", None, "data.eval.x").load([])
