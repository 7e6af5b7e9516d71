"""Scored answers in the forms in which they are written down: as pairs, and one by one."""

import json

import pytest

from rft.data.rows.scored import ScoredAnswers, ScoredPairs


def pairs(folder, rows, answers="samples", text="response", score="score", most=None, limit=None, required=("chosen",)):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    node = {
        "_target_": "rft.data.rows.sources.FileRows",
        "path": str(path),
        "columns": {},
        "schema": None,
        "limit": None,
    }
    return ScoredPairs(node, answers, text, score, "data.train", most, limit).load(required)


def answered(prompt, *scored, **fields):
    """A line of what mode=evaluate writes."""
    return {"prompt": prompt, "samples": [{"response": text, "score": score} for text, score in scored], **fields}


def told(found):
    return [(row["prompt"], row["chosen"], row["rejected"], row["margin"]) for row in found]


def test_every_better_answer_is_paired_with_every_worse_one(tmp_path):
    rows = [
        answered("a", ("w", 0.0), ("x", 1.0), ("y", 0.25), ("v", 1.0)),
        answered("b", ("w", 1.0), ("x", 1.0)),
        answered("c", ("w", False), ("x", True), data_source="s"),
    ]
    expected = [
        ("a", "x", "w", 1.0), ("a", "v", "w", 1.0), ("a", "x", "y", 0.75), ("a", "v", "y", 0.75), ("a", "y", "w", 0.25),
        ("c", "x", "w", 1.0),
    ]  # fmt: skip
    found = pairs(tmp_path, rows)
    assert told(found) == expected
    assert found[-1] == {"prompt": "c", "chosen": "x", "rejected": "w", "margin": 1.0, "data_source": "s"}
    assert told(pairs(tmp_path, rows, most=1)) == [expected[0], expected[-1]]
    assert told(pairs(tmp_path, rows, limit=3)) == expected[:3]


def test_rows_of_one_answer_each_meet_by_their_prompt(tmp_path):
    asked = [{"role": "user", "content": "a"}]
    rows = [
        {"prompt": asked, "said": {"text": "x"}, "grade": "1", "n": 0},
        {"prompt": "a", "said": {"text": "z"}, "grade": "2", "n": 1},
        {"prompt": asked, "said": {"text": "y"}, "grade": "0.5", "n": 2},
        {"prompt": asked, "said": {"text": "y"}, "grade": "7", "n": 3},  # twice: the first counts
    ]
    [found] = pairs(tmp_path, rows, answers=None, text="said.text", score="grade", required=("n",))
    assert found == {"prompt": asked, "said": {"text": "x"}, "n": 0, "chosen": "x", "rejected": "y", "margin": 0.5}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (answered("a", ("x", "good"), ("y", 1)), r"^row 1 of data\.train\.rows: the score 'good' is not a number"),
        (
            answered("a", ("x", float("nan")), ("y", 1)),
            r"the score nan is not a number; set data\.train\.score to",
        ),
        ({"prompt": "a", "samples": "x"}, r"data\.train\.answers=samples is not a list"),
        ({"prompt": "a", "samples": [{"text": "x"}]}, r"no field 'response' .*; set data\.train\.text to its name"),
        ({"prompt": "a", "samples": [{"response": "x"}]}, r"no field 'score' .*; set data\.train\.score to its name"),
        ({"prompt": "a"}, r"line 1: no field 'samples'"),
        (answered("a", ("x", 1), ("y", 1)), r"^data\.train: none of 1 prompts has answers of different scores"),
    ],
)
def test_what_cannot_be_paired_is_refused(row, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        pairs(tmp_path, [row])


def test_no_pairs_of_a_prompt_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^data\.train\.most=0 leaves no pairs"):
        pairs(tmp_path, [], most=0)


def test_answers_one_by_one_are_good_or_bad(tmp_path):
    rows = [answered("a", ("w", 0.0), ("x", 1.0), ("x", 0.5), data_source="s"), answered("b", ("y", True))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    node = {"_target_": "rft.data.rows.sources.FileRows", "columns": {}, "schema": None, "limit": None}
    node["path"] = str(tmp_path / "rows.jsonl")

    def answers(good, limit=None, required=("completion", "label")):
        return ScoredAnswers(node, "samples", "response", "score", "data.train", good, limit).load(required)

    assert [tuple(row.values()) for row in answers(0.5)] == [
        ("a", "s", "w", False), ("a", "s", "x", True), ("a", "s", "x", True), ("b", "y", True),
    ]  # fmt: skip
    assert [row["label"] for row in answers(1.0, limit=3)] == [False, True, False]
    with pytest.raises(ValueError, match=r"data\.train\.good=2: 0 of 4 answers are good; choose another"):
        answers(2)
    with pytest.raises(ValueError, match=r"data\.train\.good=0: 4 of 4 answers are good"):
        answers(0)
    with pytest.raises(ValueError, match=r"line 1: no field 'chosen'"):
        answers(0.5, required=("chosen",))
