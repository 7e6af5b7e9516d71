"""Pairs and labels become questions for a judge, and which side the better answer is on says nothing."""

import json

import pytest

from rft.data.rows.judge_data import JudgeRows, Question

BETTER = {"text": "{prompt}|{a}|{b}", "words": ["A", "B"]}
GOOD = {"text": "{prompt}|{response}|", "words": ["Yes", "No"]}
PAIRS = [{"prompt": f"{number}", "chosen": f"+{number}", "rejected": f"-{number}"} for number in range(200)]


@pytest.fixture
def verdicts(tmp_path):
    """The questions over rows in a file."""

    def load(rows, question, of="pairs", seed=0, required=(), **node):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {
            "_target_": "rft.data.rows.sources.FileRows",
            "path": str(path),
            "columns": {},
            "schema": None,
            "limit": None,
        }
        return JudgeRows(files | node, of, question, seed, "data.train").load(required)

    return load


def test_the_better_answer_is_on_either_side_equally_often_and_always_on_the_same(verdicts):
    rows = verdicts(PAIRS, BETTER)
    sides = [row["answer"] for row in rows]
    for row, pair in zip(rows, PAIRS, strict=True):
        first, second = ("chosen", "rejected") if row["answer"] == "A" else ("rejected", "chosen")
        assert row["prompt"] == f"{pair['prompt']}|{pair[first]}|{pair[second]}"
        assert row["response"] == row["answer"] and row["chosen"] == pair["chosen"]
    assert all({*sides[place : place + 2]} == {"A", "B"} for place in range(0, 200, 2)), "half of any beginning"
    assert 30 < sum(one == "A" for one in sides[::2]) < 70, "and not by turns"
    assert (
        [row["answer"] for row in verdicts(PAIRS, BETTER)] == sides == [rows[number]["answer"] for number in range(200)]
    )
    assert [row["answer"] for row in verdicts(PAIRS, BETTER, seed=1)] != sides


def test_a_pair_is_two_questions_about_one_answer(verdicts):
    rows = verdicts(PAIRS[:2], GOOD)
    found = [(row["prompt"], row["answer"], row["response"]) for row in rows]
    assert found == [("0|+0|", "Yes", "Yes"), ("0|-0|", "No", "No"), ("1|+1|", "Yes", "Yes"), ("1|-1|", "No", "No")]


def test_labels(verdicts):
    labelled = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False, "true", "0")]
    assert [row["answer"] for row in verdicts(labelled, GOOD, of="labels")] == ["Yes", "No", "Yes", "No"]
    with pytest.raises(ValueError, match=r"data\.train row 1: label is 0\.5, not true or false"):
        verdicts([labelled[0] | {"label": 0.5}], GOOD, of="labels")


def test_messages_are_read_out_and_what_stands_in_an_answer_is_no_place(verdicts):
    asked = [{"role": "system", "content": "be {b}"}, {"role": "user", "content": "hi"}]
    row = {"chosen": [{"role": "assistant", "content": "{b}"}], "rejected": [{"role": "assistant", "content": "no"}]}
    rows = verdicts([row | {"prompt": asked, "tools": [{"type": "function"}]}], BETTER, schema={"name": "messages"})
    good, bad = ("{b}", "no") if rows[0]["answer"] == "A" else ("no", "{b}")
    assert rows[0]["prompt"] == f"system: be {{b}}\n\nuser: hi|{good}|{bad}"
    assert "tools" not in rows[0], "they were the policy's"
    with pytest.raises(ValueError, match="prompt has a message without text"):
        verdicts([PAIRS[0] | {"prompt": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]}], BETTER)


def test_media_stand_in_the_question_where_their_prompt_does(verdicts, tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    picture = {"type": "image", "image": str(tmp_path / "a.png")}

    def text(value):
        return {"type": "text", "text": value}

    question = GOOD | {"text": "About {prompt}: {response}?"}
    rows = verdicts([PAIRS[0] | {"image": "a.png"}, PAIRS[1]], question)
    assert rows[0]["prompt"] == [{"role": "user", "content": [text("About "), picture, text("0: +0?")]}]
    assert rows[1]["prompt"][0]["content"][2] == text("0: -0?") and rows[0]["answer"] == "Yes"
    assert rows[2]["prompt"] == "About 1: +1?"
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "see <image>"}]
    rows = verdicts([PAIRS[0] | {"prompt": asked, "image": "a.png"}], question)
    seen = [text("About system: s\n\nuser: see "), picture, text(": +0?")]
    assert rows[0]["prompt"] == [{"role": "user", "content": seen}]


def test_a_reference_answer_is_the_rows_own(verdicts, tmp_path):
    (tmp_path / "question.txt").write_text("{answer}: {response}?")
    rows = verdicts([PAIRS[0] | {"answer": 7}], GOOD | {"text": str(tmp_path / "question.txt")})
    assert [row["prompt"] for row in rows] == ["7: +0?", "7: -0?"] and rows[0]["answer"] == "Yes"
    with pytest.raises(ValueError, match=r"rows\.jsonl line 1: no field 'answer'"):
        verdicts(PAIRS, GOOD | {"text": "{answer}: {response}?"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "{prompt} good?"}, r"^q\.text='{prompt} good\?': it needs {response}, or {a} and {b}"),
        ({"text": "{response} {a} {b}"}, "it needs {response}, or {a} and {b}"),
        ({"text": "{prompt} {a}"}, "it needs {response}, or {a} and {b}"),
        ({"text": "nothing.txt"}, r"^q\.text=nothing\.txt: there is no such file"),
        ({"words": ["Yes"]}, r"^q\.words=\['Yes'\]: name two verdicts"),
        ({"words": ["Yes", " Yes"]}, r"^q\.words=.*: name two verdicts"),
        ({"wrods": ["Yes", "No"]}, r"^q\.wrods: a question takes text, words; did you mean words\?"),
    ],
)
def test_a_question_that_is_none_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        Question.of(GOOD | change, "q")


def test_what_does_not_go_together_is_refused_by_name(verdicts):
    with pytest.raises(ValueError, match=r"^data\.train\.of=labels: a question about {a} and {b} needs pairs"):
        verdicts(PAIRS, BETTER, of="labels")
    with pytest.raises(ValueError, match=r"^data\.train\.rows: the weights of a mixture would be lost"):
        JudgeRows({"_target_": "rft.data.rows.mixture.Mixture", "parts": {}}, "pairs", GOOD, 0, "data.train")
