"""A resumed run notices rows that have changed since its checkpoint."""

import copy
import json
from itertools import pairwise

import pytest
import yaml
from PIL import Image

from rft.data.fingerprint import MOST, fingerprint, warn_of_changed_rows
from rft.data.rows.lazy import LazyRows
from rft.logger.history import WARNINGS
from rft.setup.assembly import Job
from tests.helpers import CONFIG, Interrupted, interrupt

ROWS = [{"prompt": f"{number}=", "response": str(number), "more": [1.5, None]} for number in range(20)]


def test_equal_rows_have_one_hash_and_others_another():
    known = fingerprint(ROWS)
    assert fingerprint(copy.deepcopy(ROWS)) == fingerprint(LazyRows(20, ROWS.__getitem__)) == known
    assert fingerprint([dict(reversed(row.items())) for row in ROWS]) == known
    others = [ROWS[1:], ROWS[:-1], [*ROWS, ROWS[0]], ROWS[::-1], [*ROWS[:7], ROWS[7] | {"response": "8"}, *ROWS[8:]]]
    assert len({known, *map(fingerprint, others)}) == 6
    assert fingerprint(ROWS[:1]) != fingerprint(ROWS[1:2]), "a set of one row"


def test_a_large_set_is_read_in_part_from_the_first_row_to_the_last():
    read = []

    def row(number):
        read.append(number)
        return {"n": number}

    fingerprint(LazyRows(10**7, row))
    assert len(read) == MOST == len(set(read)) and (read[0], read[-1]) == (0, 10**7 - 1)
    assert max(after - before for before, after in pairwise(read)) <= 10**7 // (MOST - 1) + 1


def test_media_in_a_row_count_by_their_content():
    def rows(color):
        return [{"image": Image.new("RGB", (2, 2), color), "sound": b"ab"}]

    assert fingerprint(rows("red")) == fingerprint(rows("red")) != fingerprint(rows("blue"))


def test_a_warning_names_the_set_and_what_happens():
    said = []
    before = {"data.train": "1", "data.eval.a": "2", "data.eval.b": "3", "data.eval.gone": "4"}
    now = {"data.train": "0", "data.eval.a": "0", "data.eval.b": "3", "data.eval.new": "5"}
    warn_of_changed_rows(before, now, said.append)
    assert said == [
        "data.train has other rows than when the checkpoint was written: the run continues at its position in the new "
        "rows; restore the old ones, or start again with resume=never",
        "data.eval.a has other rows than when the checkpoint was written: its metrics before and after this step are "
        "of different rows",
    ]
    warn_of_changed_rows({}, now, pytest.fail)


@pytest.mark.parametrize("changed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_resumes_with_other_rows_of_the_same_number(changed, tiny, tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"

    def write(last):
        file.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS[:-1], ROWS[-1] | {"response": last}]))

    config = tiny("algorithm=sft", "warmup=none", "steps=2", "batch.prompts=2", "checkpoint.every=1", "eval.every=0")
    config["data"] |= {"eval": None, "template": "none"}
    config["data"]["train"] = yaml.safe_load((CONFIG / "data" / "rows" / "file.yaml").read_text()) | {"path": str(file)}
    write("19")
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        with pytest.raises(Interrupted):
            Job(config).fit("")
    write("91" if changed else "19")
    Job(config).fit("")
    warnings = tmp_path / "run" / WARNINGS
    assert ("data.train has other rows than" in warnings.read_text() if warnings.exists() else False) is changed
