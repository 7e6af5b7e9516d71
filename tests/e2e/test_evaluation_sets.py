"""Published evaluation sets in one run: rows of small files with their columns, scripted responses, exact numbers."""

import io
import json
import string

import pytest
from rich.console import Console

from rft.modes.evaluate import evaluate

CHOICES = {"Correct Answer": "right", "Incorrect Answer 1": "x", "Incorrect Answer 2": "y", "Incorrect Answer 3": "z"}
# name of the set: (rows as published, {part of a prompt: response}, accuracy)
SETS = {
    "math_500": (
        [
            {"problem": "m1: 1/4+1/4?", "answer": r"\frac{1}{2}", "subject": "Algebra", "unique_id": "1"},
            {"problem": "m2: 1+2?", "answer": "3", "subject": "Number Theory", "unique_id": "2"},
            {"problem": "m3: sqrt 12?", "answer": r"2\sqrt{3}", "subject": "Algebra", "unique_id": "3"},
        ],
        {"m1:": "The answer is not 1.\nAnswer: 0.5", "m2:": "Answer: 4", "m3:": r"Thus \boxed{\sqrt{12}}."},
        2 / 3,
    ),
    "aime_2024": ([{"problem": "a1: ?", "answer": "033", "year": "2024"}], {"a1:": "Answer: $33$"}, 1.0),
    "aime_2025": ([{"problem": "a2: ?", "answer": "70", "id": "0"}], {"a2:": "Answer: 588"}, 0.0),
    "gpqa": (
        [{"Question": f"g{n}: ?", **CHOICES, "High-level domain": "Physics"} for n in range(3)],
        {"g0:": "Answer: A", "g1:": "Answer: A", "g2:": "I do not know."},
        None,  # by the shuffle
    ),
    "mmlu": (
        [
            {"question": "u1: ?", "choices": ["1", "2", "3", "4"], "answer": 2, "subject": "anatomy"},
            {"question": "u2: ?", "choices": ["1", "2", "3", "4"], "answer": 0, "subject": "virology"},
        ],
        {"u1:": "I doubt that the answer is A.\nAnswer: (C)", "u2:": "The answer is B"},
        0.5,
    ),
    "mmlu_pro": (
        [{"question": "p1: ?", "options": list("abcdefghij"), "answer": "J", "answer_index": 9, "category": "law"}],
        {"p1:": "So.\nAnswer: J"},
        1.0,
    ),
    "ifeval": (
        [
            {"prompt": "i1: no commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
            {"prompt": "i2: a title.", "instruction_id_list": ["detectable_format:title"], "kwargs": [{}]},
        ],
        {"i1:": "Yes; right.", "i2:": "Title"},
        0.5,
    ),
}
MODEL = (
    *("actor.model_config.hidden_size=16", "actor.model_config.intermediate_size=32", "actor.model_config.head_dim=8"),
    *("actor.model_config.max_position_embeddings=8192", "data.template=none", "data.max_response_tokens=64"),
)


# The folders of two sets as the hub has them: the names of the files and the card say what split and configuration are.
FOLDERS = {"math_500": "test.jsonl", "gpqa": "gpqa_diamond.jsonl"}
CARD = """---
configs:
- config_name: gpqa_diamond
  data_files: gpqa_diamond.jsonl
- config_name: gpqa_main
  data_files: gpqa_main.jsonl
---
"""


def write(folder, name, rows):
    """Writes the rows of a set, as a folder or as one file; returns the overrides that name it."""
    folder = folder / name
    folder.mkdir()
    path, node = folder / FOLDERS.get(name, "rows.jsonl"), f"data.eval.{name}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if name not in FOLDERS:
        return [f"{node}.path={path}", f"{node}.split=null", f"{node}.name=null"]
    if name == "gpqa":
        (folder / "README.md").write_text(CARD)
        (folder / "gpqa_main.jsonl").write_text('{"Question": "none of these"}\n')
    return [f"{node}.path={folder}"]


@pytest.fixture(scope="module")
def run(resolved, tmp_path_factory):
    """The result of an evaluation of all sets, its report, and its answers."""
    folder = tmp_path_factory.mktemp("sets")
    overrides = [f"+data/rows@data.eval.{name}={name}" for name in ("mmlu", "mmlu_pro", "ifeval")]
    for name, (rows, _, _) in SETS.items():
        overrides += write(folder, name, rows)
    chosen = ("mode=evaluate", "data=benchmarks", "reward=benchmarks", "warmup=none", f"output_dir={folder / 'run'}")
    config = resolved(*chosen, *overrides, *MODEL)
    config["actor"]["tokenizer"]["alphabet"] = string.printable
    answers = {part: text for _, responses, _ in SETS.values() for part, text in responses.items()}
    config["rollout"]["engine"] = {"_target_": "tests.e2e.scripted_engine.ScriptedEngine", "answers": answers}
    result = evaluate(config, Console(file=io.StringIO()))
    lines = [json.loads(line) for line in (folder / "run/answers.jsonl").open()]
    return result, json.loads((folder / "run/evaluation.json").read_text())["numbers"], lines


def test_every_set_has_the_accuracy_of_its_own_checker(run):
    result, numbers, answers = run
    assert result == numbers["eval/math_500/accuracy"], "the metric is that of the first set"
    for name, (_, _, accuracy) in SETS.items():
        if accuracy is not None:
            assert numbers[f"eval/{name}/accuracy"] == pytest.approx(accuracy), name
    shuffled = [line for line in answers if "\nA) " in line["prompt"] and "g" in line["prompt"].split("\n")[2][:1]]
    assert len(shuffled) == 3
    right = [line["response"] == "Answer: A" and "\nA) right" in line["prompt"] for line in shuffled]
    assert [line["score"] for line in shuffled] == [float(value) for value in right]
    assert numbers["eval/gpqa/accuracy"] == pytest.approx(sum(right) / 3)


def test_subjects_are_reported_by_themselves(run):
    _, numbers, _ = run
    assert numbers["eval/math_500/math_500/algebra/accuracy"] == 1.0
    assert numbers["eval/math_500/math_500/number_theory/accuracy"] == 0.0
    assert numbers["eval/mmlu/mmlu/anatomy/accuracy"] == 1.0 and numbers["eval/mmlu/mmlu/virology/accuracy"] == 0.0
    assert not any(name.startswith("eval/gpqa/gpqa/") for name in numbers), "one subject alone is the set"
