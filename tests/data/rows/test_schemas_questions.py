"""Prompts of question sets, with the columns of the published files: hand-written rows, one of each kind."""

import json

import pytest

from rft.data.rows.schemas import LETTERS, SCHEMAS
from rft.data.rows.sources import FileRows, HubRows
from tests.helpers import yaml_options

PARIS = {"prompt": "Capital of France? ", "choices": ["Rome", " Paris"], "answer": 1, "subject": "World Geography!"}
TEXT = "Q {prompt}\n{choices}\none of {letters}"


def schema(name, **options):
    return SCHEMAS.build({"name": name, **options}, "data.train.schema")


def choices(row=PARIS, **changes):
    options = {"text": TEXT, "choices": "choices", "shuffle": None, "source": "quiz", "subject": None, **changes}
    return schema("multiple_choice", **options)(row)


def test_instructions_stand_around_the_question():
    row = {"prompt": " Is {prompt} or {letters}? ", "answer": "7", "level": 5, "kind": "Counting & Probability"}
    asked = schema("question", text="Solve: {prompt}\nAnswer: X", source="math", subject="kind")(row)
    assert asked["prompt"] == "Solve: Is {prompt} or {letters}?\nAnswer: X", "the question itself is not filled in"
    assert asked["data_source"] == "math/counting_probability" and (asked["answer"], asked["level"]) == ("7", 5)
    plain = schema("question", text="{prompt} {choices}", source="math", subject=None)({"prompt": "Q"})
    assert plain == {"prompt": "Q {choices}", "data_source": "math"}, "a placeholder of multiple choice is text here"


def test_choices_are_lines_with_letters():
    row = choices()
    assert row["prompt"] == "Q Capital of France?\nA) Rome\nB) Paris\none of AB"
    assert row["answer"] == "B" and row["data_source"] == "quiz"
    assert choices(subject="subject")["data_source"] == "quiz/world_geography"
    assert choices(PARIS | {"subject": " "}, subject="subject")["data_source"] == "quiz"
    assert choices(PARIS | {"subject": "Алгебра"}, subject="subject")["data_source"] == "quiz/алгебра"
    assert choices(PARIS | {"answer": "b"})["answer"] == "B", "a letter, as MMLU-Pro has it"
    ten = choices({"prompt": "?", "options": [f"n{n}" for n in range(10)], "answer": "J"}, choices="options")
    assert ten["answer"] == "J" and ten["prompt"].endswith("J) n9\none of ABCDEFGHIJ")


def test_a_shuffle_depends_on_seed_and_question_alone():
    fields = ["right", "wrong 1", "wrong 2", "wrong 3"]
    rows = [{"prompt": f"question {n}", **{name: name.upper() for name in fields}} for n in range(400)]
    first, again, other = (
        [choices(row, choices=fields, shuffle=seed) for row in where]
        for seed, where in ((0, rows), (0, rows[::-1]), (1, rows))
    )
    assert first == again[::-1] != other
    for row in first:
        assert f"{row['answer']}) RIGHT\n" in row["prompt"], "the letter follows the right choice"
        assert all(row["prompt"].count(f") {name.upper()}\n") == 1 for name in fields)
    counts = [sum(row["answer"] == letter for row in first) for letter in "ABCD"]
    assert sum(counts) == 400 and min(counts) > 70, "each letter is right in about a quarter"
    assert choices(rows[0], choices=fields)["answer"] == "A", "without a shuffle the first field stays the first"


@pytest.mark.parametrize(
    ("row", "changes", "said"),
    [
        (PARIS | {"answer": 2}, {}, r"the field 'answer' is 2, and not the letter or index of a choice"),
        (PARIS | {"answer": -1}, {}, r"'answer' is -1"),
        (PARIS | {"answer": True}, {}, r"'answer' is True"),
        (PARIS | {"answer": "C"}, {}, r"'answer' is 'C'"),
        (PARIS | {"answer": "Paris"}, {}, r"'answer' is 'Paris'"),
        (PARIS | {"answer": ""}, {}, r"'answer' is ''"),
        (PARIS | {"choices": "Rome"}, {}, r"the field 'choices' is no list of texts: 'Rome'"),
        (PARIS | {"choices": [1, 2]}, {}, r"the field 'choices' is no list of texts"),
        (PARIS | {"choices": ["Paris"], "answer": 0}, {}, r"needs 2 to 26 choices, and there are 1"),
        (PARIS | {"choices": [*LETTERS, "more"]}, {}, r"needs 2 to 26 choices, and there are 27"),
        (PARIS, {"choices": "options"}, r"no field 'options' \(known: prompt, choices, answer, subject\)"),
        (PARIS, {"choices": ["answer", "subject"]}, r"the field 'answer' is no text: 1"),
        (PARIS | {"prompt": [{"role": "user", "content": "?"}]}, {}, r"the field 'prompt' is no text"),
        (PARIS, {"subject": "field"}, r"no field 'field'"),
        (PARIS | {"subject": None}, {"subject": "subject"}, r"no field 'subject'"),
    ],
)
def test_rows_that_are_no_questions(row, changes, said):
    with pytest.raises(ValueError, match=said):
        choices(row, **changes)


def test_a_text_without_its_placeholders():
    with pytest.raises(ValueError, match=r"^data\.train\.schema\.text='Solve': it needs \{prompt\}$"):
        schema("question", text="Solve", source="math", subject=None)
    with pytest.raises(ValueError, match=r"^data\.train\.schema\.text='\{prompt\}': it needs \{choices\}$"):
        choices(text="{prompt}")


# A row of each published set, with the columns that the file has.
PROBLEM = {"problem": "What is $1+1$?", "answer": "2"}
PUBLISHED = {
    "math_500": (PROBLEM | {"solution": r"\boxed{2}", "subject": "Algebra", "level": 1, "unique_id": "test/1"},
                 "2", "math_500/algebra"),
    "aime_2024": (PROBLEM | {"id": 60, "solution": "...", "url": "...", "year": "2024"}, "2", "aime_2024"),
    "aime_2025": (PROBLEM | {"id": "0"}, "2", "aime_2025"),
    "mmlu": ({"question": "Capital of France?", "subject": "high_school_geography", "choices": ["1", "2", "3", "4"],
              "answer": 3}, "D", "mmlu/high_school_geography"),
    "mmlu_pro": ({"question_id": 70, "question": "Capital of France?", "options": list("ABCDEFGHI"), "answer": "I",
                  "answer_index": 8, "cot_content": "", "category": "computer science", "src": "ori"},
                 "I", "mmlu_pro/computer_science"),
    "gpqa": ({"Question": "Capital of France?", "Correct Answer": "Paris\n", "Incorrect Answer 1": "Rome",
              "Incorrect Answer 2": "Bern", "Incorrect Answer 3": "Oslo", "High-level domain": "Physics",
              "Subdomain": "Physics (general)", "Record ID": "rec1"}, None, "gpqa/physics"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_option_files_read_the_published_columns(name, tmp_path, resolved):
    row, answer, source = PUBLISHED[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    changes = (f"data.eval.heldout.{key}" for key in (f"path={path}", "name=null", "split=null"))
    config = resolved("data=benchmarks", f"+data/rows@data.eval.heldout={name}", *changes)
    node = config["data"]["eval"]["heldout"]
    assert node.pop("_target_") == "rft.data.rows.sources.HubRows"
    [found] = HubRows(**node, key="data.eval.heldout").load(["prompt", "answer"])
    question = row.get("problem") or row.get("question") or row["Question"]
    assert found["prompt"].count(question) == 1 and 'the form "Answer: X"' in found["prompt"]
    assert found["data_source"] == source and found["answer"] == (answer or found["answer"])
    if answer is None:
        assert f"\n{found['answer']}) Paris" in found["prompt"] and "the letters ABCD." in found["prompt"]


def test_one_file_in_place_of_a_data_set_of_the_hub(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\n1+1,2\n2+2,4\n")
    options = yaml_options("data/rows/hub.yaml") | {"path": str(path), "limit": 1}
    rows = HubRows(**options | {"split": None}, key="data.train")
    same = FileRows(str(path), {}, None, 1, "data.train")
    assert list(rows.load(["prompt"])) == list(same.load(["prompt"])) == [{"prompt": "1+1", "answer": "2"}]
    assert list(rows.stream(["prompt"]).preview()) == list(same.load(["prompt"]))
    said = r"^data\.train\.path=.*rows\.csv is one file; set data\.train\.name=null and data\.train\.split=null$"
    with pytest.raises(ValueError, match=said):
        HubRows(**options | {"name": "main"}, key="data.train")
