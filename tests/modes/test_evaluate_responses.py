"""`mode=evaluate` with given responses: the very numbers of the evaluation that sampled them, without a model."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from rft.modes.evaluate import evaluate
from rft.modes.generate import generate

DATA = os.environ.get("RFT_GSM8K_DIR")


@pytest.fixture
def rescored(config, unloaded, tmp_path):
    """Scores a file of responses; returns the report, the written answers and what is printed."""

    def run(*overrides):
        console = Console(file=io.StringIO(), width=200)
        evaluate(config("mode=evaluate", *overrides), console)
        report = json.loads((tmp_path / "run" / "rescored.json").read_text())
        answers = [json.loads(line) for line in (tmp_path / "run" / "rescored.jsonl").read_text().splitlines()]
        return report, answers, console.file.getvalue()

    return run


@pytest.fixture(scope="module")
def sampled(finished, resolved, tmp_path_factory):
    """The folder with what the evaluation of the run wrote."""
    folder = tmp_path_factory.mktemp("sampled") / "run"
    shutil.copytree(finished[1], folder, symlinks=True)
    evaluate(resolved(*finished[0], f"output_dir={folder}", "mode=evaluate"), Console(file=io.StringIO()))
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"evaluate.responses={path}"


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_numbers_are_those_of_the_evaluation(rescored, sampled, monkeypatch):
    monkeypatch.setattr("rft.modes.model.pretrained", lambda **_: pytest.fail("a tokenizer was loaded"))
    report, answers, printed = rescored(f"evaluate.responses={sampled / 'answers.jsonl'}")
    evaluation = json.loads((sampled / "evaluation.json").read_text())
    assert report["numbers"] == evaluation["numbers"] and report["intervals"] == evaluation["intervals"]
    assert any(name.endswith("maj@4") for name in report["numbers"]) and "eval/questions/length" in report["numbers"]
    assert answers == read(sampled / "answers.jsonl")
    assert "answers.jsonl" in printed and "95 % interval" in printed


def test_the_accuracy_of_a_function_of_verl_is_its_acc(rescored, sampled, tmp_path):
    """Right, wrong, wrong: the scores 1, -1, -1, the letters 2 and twice 5."""
    rows = [row | {"response": "wrong"} for row in read(sampled / "answers.jsonl")[:3]]
    rows[0] |= {"response": str(rows[0]["answer"]).zfill(1)}
    function = Path(__file__).parents[1] / "reward" / "user_functions.py"
    asked = [
        f"reward.terms.function.function={function}:signed",
        "evaluate.unanswered=skip",
        "eval.samples=0",
        "eval.maj_k=[]",
    ]
    some = write(tmp_path / "some.jsonl", [{n: v for n, v in row.items() if n != "samples"} for row in rows])
    report, answers, printed = rescored("reward/terms=[gsm8k,function]", "reward.accuracy=function", *asked, some)
    letters = (len(rows[0]["response"]) + 10) / 3
    expected = {"accuracy": 1 / 3, "score": -1 / 3, "function/letters": letters}
    assert {name: report["numbers"][f"eval/questions/{name}"] for name in expected} == pytest.approx(expected)
    assert "function/letters" in printed and [row["score"] for row in answers] == [1.0, 0.0, 0.0]


def test_responses_to_prompts_that_open_a_thought_are_scored_as_such(rescored, sampled, tmp_path):
    """Of the first line the response and all samples answer right inside of a thought that does not end."""
    rows = read(sampled / "answers.jsonl")[:2]
    for row in rows:
        row["response"] = str(row["answer"])
        row["samples"] = [{"response": str(row["answer"])} for _ in row["samples"]]
    opens = {"prompt_opens": "<think>"}
    rows[0] |= opens | {"samples": [sample | opens for sample in rows[0]["samples"]]}
    rows[1]["samples"][0] = {"response": f"hm</think>{rows[1]['answer']}", **opens}
    _, answers, _ = rescored(write(tmp_path / "some.jsonl", rows), "evaluate.unanswered=skip")
    assert [row["score"] for row in answers] == [0.0, 1.0]
    assert [{sample["score"] for sample in row["samples"]} for row in answers] == [{0.0}, {1.0}]
    assert [row.get("prompt_opens") for row in answers] == ["<think>", None]
    assert [sample.get("prompt_opens") for sample in answers[1]["samples"]][:2] == ["<think>", None]
    [first, second] = read(tmp_path / "run" / "rescored.jsonl")
    assert first["samples"][0]["prompt_opens"] == "<think>" and "prompt_opens" not in second


def test_the_order_of_the_lines_does_not_matter(rescored, sampled, tmp_path):
    rows = read(sampled / "answers.jsonl")
    report, answers, _ = rescored(write(tmp_path / "reversed.jsonl", rows[::-1]))
    assert report["numbers"] == json.loads((sampled / "evaluation.json").read_text())["numbers"]
    assert answers == rows


def test_another_reward_and_a_part_of_the_lines(rescored, sampled, tmp_path):
    rows = [{**row, "samples": None} for row in read(sampled / "answers.jsonl")[:5]]
    rows[0]["response"] = str(rows[0]["answer"])
    report, answers, _ = rescored(
        write(tmp_path / "some.jsonl", rows), "evaluate.unanswered=skip", "eval.samples=0", "eval.maj_k=[]",
        "reward/terms=[gsm8k,exact_match]", "reward.accuracy=exact_match",
    )  # fmt: skip
    right = [float(row["response"].strip() == str(row["answer"])) for row in rows]
    assert [row["score"] for row in answers] == right and right[0] == 1.0
    assert report["numbers"]["eval/questions/accuracy"] == sum(right) / 5


@pytest.fixture(scope="module")
def drafts(finished, resolved, tmp_path_factory):
    """What mode=generate writes for the questions."""
    path, questions = tmp_path_factory.mktemp("drafts") / "drafts.jsonl", finished[1].parent / "questions.jsonl"
    options = (f"generate.input={questions}", f"generate.output={path}", "generate.samples=2")
    generate(resolved(*finished[0], "mode=generate", *options), Console(file=io.StringIO()))
    return path


def test_what_mode_generate_writes(drafts, rescored):
    report, answers, _ = rescored(
        f"evaluate.responses={drafts}", "+evaluate.columns.samples=completions", "eval.samples=2", "eval.maj_k=[]",
        "metric=eval/questions/mean@2",
    )  # fmt: skip
    texts = [[completion["text"] for completion in row["completions"]] for row in read(drafts)]
    assert [[sample["response"] for sample in row["samples"]] for row in answers] == texts
    assert set(report["numbers"]) >= {"eval/questions/mean@2", "eval/questions/pass@2"}
    assert "eval/questions/accuracy" not in report["numbers"]


def test_the_texts_of_a_run_and_the_rows_that_it_trained_on(rescored, finished):
    """Lines of one prompt are its samples; those of sets that are not evaluated are left out, with a message."""
    (file,) = (finished[1] / "trajectories").glob("step_00000003.jsonl")
    rows = [row for row in read(file) if row["set"] == "train"]
    report, answers, printed = rescored(
        f"evaluate.responses={file}", "evaluate.unanswered=skip", "+data.eval.train=${data.train}",
        "~data.eval.questions", "data.train.columns={}", "eval.samples=4", "eval.maj_k=[4]", "metric=eval/train/mean@4",
    )  # fmt: skip
    assert len(answers) == 4 and sum(len(row["samples"]) for row in answers) == len(rows) == 16
    assert report["numbers"]["eval/train/mean@4"] == pytest.approx(sum(row["score"] for row in rows) / 16)
    assert "16 responses to the set 'questions' are left out" in printed


ONE = {"prompt": "add 16=", "response": "6", "tokens": 2}


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ([ONE], (), r"23 of the 24 rows of data.eval.questions have no response, the first is .* line 2"),
        ([ONE, {**ONE, "prompt": "add 1="}], (), "given.jsonl line 2: no row of data.eval has this prompt: 'add 1='"),
        ([ONE, {"prompt": "add 17="}], (), r"given.jsonl line 2: no response \(fields: prompt\)"),
        ([{"response": "6"}], (), r"given.jsonl line 1: no field 'prompt' .*evaluate.columns.prompt"),
        ([ONE, ONE], (), "given.jsonl line 1: 2 sampled responses of a row, but eval.samples=0; set eval.samples=2"),
        ([{**ONE, "samples": ["1"]}], (), "1 sampled responses of a row, but eval.samples=0"),
        ([{**ONE, "samples": "1"}], (), "the field of the sampled responses is '1', not a list"),
        ([{**ONE, "response": 6}], (), "given.jsonl line 1: 6 is no response"),
        ([{**ONE, "set": "other"}], (), "no row of data.eval has a response"),
        ([ONE], ("evaluate.match=id",), "no field 'id'"),
        ([{**ONE, "id": 1}], ("evaluate.match=id",), "questions.jsonl line 1: the row has no field 'id'"),
        ([], (), "the file holds no rows"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(rows, overrides, message, rescored, tmp_path):
    unanswered = "error" if "23 of" in message else "skip"
    with pytest.raises(ValueError, match=message):
        rescored(
            write(tmp_path / "given.jsonl", rows), f"evaluate.unanswered={unanswered}", "eval.samples=0",
            "eval.maj_k=[]", *overrides,
        )  # fmt: skip


def test_samples_alone_have_no_accuracy(rescored, tmp_path):
    rows = [{"prompt": f"add {number}=", "samples": ["1", "6"]} for number in range(16, 40)]
    with pytest.raises(ValueError, match=r"metric=eval/questions/accuracy: .* has samples alone; set metric=.*mean@2"):
        rescored(write(tmp_path / "given.jsonl", rows), "eval.samples=2", "eval.maj_k=[]")


def test_a_run_without_answers_scores_none(resolved):
    config = resolved("mode=evaluate", "algorithm=sft", "eval.loss=true", "evaluate.responses=given.jsonl")
    with pytest.raises(ValueError, match=r"evaluate\.responses: this run evaluates no answers"):
        evaluate(config, Console())


@pytest.mark.skipif(DATA is None, reason="RFT_GSM8K_DIR is not set")
def test_the_model_solutions_of_gsm8k_are_judged_as_the_data_set_says(resolved, tmp_path):
    solutions = Path(DATA or "") / "model_solutions.jsonl"
    config = resolved(
        "mode=evaluate", "data=questions", f"data.eval.questions.path={DATA}/test.jsonl", "reward=gsm8k",
        "data.eval.questions.columns.prompt=question", "metric=eval/questions/accuracy",
        "reward.terms.gsm8k.markers=['A:']", f"evaluate.responses={solutions}", "evaluate.unanswered=skip",
        "+evaluate.columns.prompt=question", "+evaluate.columns.response=175b_verification.solution",
        f"output_dir={tmp_path}",
    )  # fmt: skip
    accuracy = evaluate(config, Console(file=io.StringIO()))
    judged = {row["question"].strip(): row["175b_verification"]["is_correct"] for row in read(solutions)}
    answers = read(tmp_path / "rescored.jsonl")
    assert [row["score"] for row in answers] == [float(judged[row["prompt"].strip()]) for row in answers]
    assert len(answers) == len(judged) == 660 and accuracy == sum(judged.values()) / 660
