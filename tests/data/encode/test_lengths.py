"""Prompts that are too long are dropped, and the run says so."""

import json
import re

import pytest

from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Lengths, limit_prompts
from rft.data.encode.tokenizer import characters
from rft.data.encode.truncation import PromptLimit
from rft.data.rows.mixture import Mixed
from rft.distributed import SINGLE_PROCESS
from rft.setup.assembly import Job

ENCODER = Encoder(characters(alphabet="0123456789="), "none", None, None, "response")
ROWS = [{"prompt": "1" * length} for length in (3, 9, 1, 5, 5)]


def drop(rows, most):
    said: list[str] = []
    counts = Lengths(SINGLE_PROCESS, ENCODER, None).prompts(rows)
    limit = None if most is None else PromptLimit(most, "drop")
    left, counts = limit_prompts(rows, counts, limit, "data.train", said.append)
    assert counts == [len(row["prompt"]) for row in left]
    return left, said


def test_longer_prompts_are_dropped_and_the_others_stay_in_order():
    rows, said = drop(ROWS, 4)
    assert list(rows) == [ROWS[0], ROWS[2]] and len(rows) == 2
    assert said == [
        "data.train: 3 of 5 prompts have more tokens than data.max_prompt_tokens=4; the longest has 9. They are dropped"
    ]


@pytest.mark.parametrize("most", [None, 9])
def test_nothing_is_said_where_nothing_is_dropped(most):
    assert drop(ROWS, most) == (ROWS, [])


def test_nothing_left_is_an_error():
    with pytest.raises(
        ValueError, match=r"data\.train: 5 of 5 prompts .* has 9, the shortest 1, and no row is left; r"
    ):
        drop(ROWS, 0)


def test_a_mixture_keeps_its_parts():
    mixed = Mixed({"a": ROWS[:2], "b": ROWS[2:]}, {"a": 1.0, "b": 3.0})
    rows, _ = drop(mixed, 4)
    assert isinstance(rows, Mixed) and rows.weights == mixed.weights
    assert list(rows) == [ROWS[0] | {"data_source": "a"}, ROWS[2] | {"data_source": "b"}]
    with pytest.raises(ValueError, match=r"data\.train\.parts\.a: all rows have more tokens than data\.max_prompt"):
        drop(mixed, 1)


def test_a_run_says_what_it_drops_of_each_set(tiny, tmp_path, capsys):
    """Prompts are "reverse <digits>=": nine tokens and the digits."""
    config = tiny("algorithm=sft", "steps=1", "data.max_prompt_tokens=11", "data.train.length=[1,3]")
    assert Job(config).fit("") >= 0.0
    said = " ".join(capsys.readouterr().out.split())
    for key, total in (("data.train", 64), ("data.eval.heldout", 8)):
        found = re.search(
            rf"{re.escape(key)}: (\d+) of {total} prompts have more tokens than data.max_prompt_tokens=11; ", said
        )
        assert found and 0 < int(found[1]) < total
        assert said[found.end() :].startswith("the longest has 12.")
    rows = [json.loads(line) for file in (tmp_path / "run" / "trajectories").iterdir() for line in file.open()]
    assert rows and all(len(row["prompt"]) <= 11 for row in rows)
    with pytest.raises(ValueError, match=r"data\.train: 64 of 64 prompts .*no row is left"):
        Job(config | {"data": config["data"] | {"max_prompt_tokens": 9}}).fit("")
