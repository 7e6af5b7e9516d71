"""Which rows given responses answer."""

import json

import pytest

from rft.evaluation.given import GivenAnswers
from rft.evaluation.responses import match_responses, read_responses

SETS = {
    "one": [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}, {"prompt": "b", "id": 3}],
    "two": [{"prompt": [{"role": "user", "content": "a "}], "id": 4}],
}


@pytest.fixture
def read(tmp_path):
    def records(rows, columns=(), match="prompt"):
        path = tmp_path / "given.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_responses(str(path), dict(columns), match)

    return records


def given(answers):
    return {name: [one.response or one.samples for one in found] for name, found in answers.items()}


def test_rows_with_equal_prompts_take_their_responses_in_order(read):
    rows = [{"prompt": "b", "response": "2"}, {"prompt": "a", "response": "1"}, {"prompt": "b", "response": "3"}]
    found, answers = match_responses({"one": SETS["one"]}, read(rows), "prompt", 0, "error")
    assert list(found["one"]) == SETS["one"] and given(answers) == {"one": ["1", "2", "3"]}


def test_a_set_that_is_named_and_one_that_is_not(read):
    """A message of a user is the same as its text; with `eval/` in front a set is named in the texts of a run."""
    rows = [{"set": "eval/two", "prompt": " a", "response": "4"}, {"set": "one", "prompt": "a", "response": "1"}]
    records = read([*rows, {"set": "train", "prompt": "z", "response": "9"}])
    found, answers = match_responses(SETS, records, "prompt", 0, "skip")
    assert given(answers) == {"one": ["1"], "two": ["4"]} and [len(part) for part in found.values()] == [1, 1]
    with pytest.raises(ValueError, match=r"line 1: 2 rows of data.eval have this prompt, and 1 responses: 'a'"):
        match_responses(SETS, read([{"prompt": "a", "response": "1"}]), "prompt", 0, "skip")


def test_an_id_and_other_names(read):
    rows = [{"no": number, "out": {"texts": [f"{number}", {"text": "x"}]}} for number in ("3", "1", "2")]
    records = read(rows, {"id": "no", "samples": "out.texts"}, match="id")
    assert given(match_responses({"one": SETS["one"]}, records, "id", 2, "error")[1]) == {
        "one": [["1", "x"], ["2", "x"], ["3", "x"]]
    }


def test_lines_of_one_row_are_its_samples(read):
    rows = [{"id": 4, "response": text} for text in "xyz"]
    answers = match_responses({"two": SETS["two"]}, read(rows, match="id"), "id", 3, "error")[1]
    assert answers["two"] == [GivenAnswers(None, None, ["x", "y", "z"])]
    with pytest.raises(ValueError, match=r"3 sampled responses of a row, but eval.samples=2; set eval.samples=3"):
        match_responses({"two": SETS["two"]}, read(rows, match="id"), "id", 2, "error")
    mixed = [*rows, {"id": 4, "samples": ["x"]}]
    with pytest.raises(ValueError, match="line 1: 4 lines answer one row; each must then have a single response"):
        match_responses({"two": SETS["two"]}, read(mixed, match="id"), "id", 4, "error")


def test_a_single_response_and_its_tokens(read):
    rows = [{"id": 1, "response": [{"text": "x", "tokens": 7}]}, {"id": 2, "response": "y", "tokens": 5}]
    answers = match_responses({"one": SETS["one"]}, read(rows, match="id"), "id", 0, "skip")[1]
    assert answers["one"] == [GivenAnswers("x", 7, []), GivenAnswers("y", 5, [])]


def test_rows_with_and_without_a_single_response(read):
    rows = [{"id": 1, "samples": ["x"]}, {"id": 2, "response": "y", "samples": ["z"]}]
    with pytest.raises(ValueError, match=r"line 1: this row has samples alone, and that of .* line 2 has a single"):
        match_responses({"one": SETS["one"]}, read(rows, match="id"), "id", 1, "skip")
