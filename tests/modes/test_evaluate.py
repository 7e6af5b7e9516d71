"""`mode=evaluate`: the very numbers of training, of any checkpoint, on any number of ranks."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rft.evaluation.estimators import interval
from rft.modes.evaluate import evaluate
from rft.setup.assembly import Job
from rft.train.checkpoint.manifest import write_manifest

HERE = Path(__file__).parent


@pytest.fixture
def evaluated(config, tmp_path):
    """Evaluates; returns what is returned, the report, the answers and what is printed."""

    def run(*overrides):
        console = Console(file=io.StringIO(), width=200)
        result = evaluate(config("mode=evaluate", *overrides), console)
        report = json.loads((tmp_path / "run" / "evaluation.json").read_text())
        answers = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
        return result, report, answers, console.file.getvalue()

    return run


def logged(folder, step):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: value for name, value in rows[step].items() if name.startswith("eval/")}


def test_the_numbers_are_those_that_the_run_logged(evaluated, finished, tmp_path):
    result, report, _, printed = evaluated()
    assert report["numbers"] == logged(finished[1], 3)
    assert result == report["numbers"]["eval/questions/accuracy"]
    assert any(value not in (0, 1) for name, value in report["numbers"].items() if "maj@4" in name), "a trivial test"
    assert report["model"].endswith("step_00000003/actor") and report["model"] in printed.replace("\n", "")
    assert not list(tmp_path.glob("evaluate-*")), "nothing stays beside the run"


def test_other_checkpoints_and_the_model_itself(evaluated, finished):
    numbers = evaluated("evaluate.checkpoint=2")[1]["numbers"]
    assert numbers == logged(finished[1], 2) != logged(finished[1], 3)
    _, report, _, _ = evaluated("evaluate.checkpoint=null")
    assert report["numbers"] == logged(finished[1], 0)
    assert report["model"] == "a new qwen3, untrained"


def test_the_best_checkpoint(evaluated, finished, tmp_path):
    metrics = {step: logged(finished[1], step)["eval/questions/accuracy"] for step in (2, 3)}
    write_manifest(tmp_path / "run/checkpoints/step_00000002", {}, {"step": 2, "metric": max(metrics.values()) + 0.1})
    assert evaluated("evaluate.checkpoint=best")[1]["numbers"] == logged(finished[1], 2)


def test_intervals_sources_and_answers(evaluated):
    _, report, answers, printed = evaluated()
    assert len(answers) == 24 and len(answers[0]["samples"]) == 6
    scores = [line["score"] for line in answers]
    sets = report["intervals"]["questions"]
    assert sets["all"]["accuracy"] == pytest.approx(interval(scores))
    odd = [line["score"] for number, line in enumerate(answers) if number % 2]
    assert sets["odd"]["accuracy"] == pytest.approx(interval(odd))
    assert report["numbers"]["eval/questions/odd/accuracy"] == sum(odd) / 12
    means = [sum(sample["score"] for sample in line["samples"]) / 6 for line in answers]
    assert sets["all"]["mean@6"] == pytest.approx(interval(means))
    for line in answers:
        for sample in (line, *line["samples"]):
            assert sample["score"] == float(sample["extracted"] == str(line["answer"]))
    assert "questions/odd" in printed and "95 % interval" in printed


def test_another_data_set_and_another_reward(evaluated, tmp_path):
    """Weights and tokenizer are the run's; all else is what this command says."""
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "sort 1=", "answer": "1"}))
    _, report, answers, _ = evaluated(
        f"data.eval.questions.path={tmp_path / 'other.jsonl'}", "reward/terms=[gsm8k,exact_match]",
        "reward.accuracy=exact_match", "eval.samples=0", "eval.maj_k=[]", "actor/tokenizer=characters",
        "actor.tokenizer.alphabet='0123456789'", "data.train.path=nowhere.jsonl",
    )  # fmt: skip
    assert [line["prompt"] for line in answers] == ["sort 1="]
    assert "eval/questions/accuracy" in report["numbers"] and "samples" not in answers[0]


def test_a_baseline_leaves_the_folder_to_the_run(finished, resolved, tmp_path):
    """Where output_dir holds no run the model is that of the config; the run then takes the same folder."""
    config = resolved(*finished[0], f"output_dir={tmp_path / 'new'}", "mode=evaluate")
    found = evaluate(config, Console(file=io.StringIO()))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["answers.jsonl", "evaluation.json"]
    assert found == logged(finished[1], 0)["eval/questions/accuracy"]
    Job(config | {"mode": "train"}).fit("")
    assert (tmp_path / "new" / "result.json").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluate.checkpoint=7"], "evaluate.checkpoint=7: .* has no checkpoint of this step; its .* 1, 2, 3"),
        (["output_dir=none", "evaluate.checkpoint=best"], "evaluate.checkpoint=best: output_dir=none holds no run"),
        (["data.eval.questions.path=no.jsonl"], "data.eval.questions.path=no.jsonl: there is no such file"),
        (["+data.eval.questions.columns.answer=gold"], "no field 'gold' .*; set data.eval.questions.columns.answer"),
        (["eval.maj_k=[9]"], r"eval.maj_k=\[9\] asks for more answers than eval.samples=6"),
        (["eval.maj_k=[0]"], r"eval\.maj_k\[0\]=0: it must be at least 1"),
        (["rollout.max_new_tokens=5000"], "rollout.max_new_tokens=5000 that is over the model's context"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(overrides, message, config, unloaded, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        evaluate(config("mode=evaluate", *[word.removeprefix("+") for word in overrides]), Console())


def test_a_vote_needs_a_reward_that_tells_the_answer(config):
    with pytest.raises(ValueError, match=r"eval.maj_k=\[1, 4, 6\]: reward.accuracy=format does not extract an answer"):
        evaluate(config("mode=evaluate", "reward/terms=[gsm8k,format]", "reward.accuracy=format"), Console())


def test_a_run_is_not_evaluated_on_what_trained_it(config, unloaded):
    same = config("data.train.path=questions.jsonl", "data.eval.questions.path=questions.jsonl")
    with pytest.raises(ValueError, match=r"data.train is the same as data.eval.questions, so nothing is held out"):
        Job(same).fit("")


@pytest.mark.slow
def test_two_ranks_say_what_one_says(finished, config, evaluated, torchrun, tmp_path):
    _, alone, answers, _ = evaluated()
    file, output = tmp_path / "config.json", tmp_path / "out.jsonl"
    both = config("mode=evaluate")
    generated = config(
        "mode=generate", f"generate.input={finished[1].parent / 'questions.jsonl'}", "generate.chunk=5",
        f"generate.output={output}", "generate.samples=2",
    )  # fmt: skip
    file.write_text(json.dumps([both, generated]))
    (tmp_path / "run" / "evaluation.json").unlink()
    torchrun(HERE / "modes_on_ranks.py", file, tmp_path / "printed")
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text()) == alone
    lines = (tmp_path / "run" / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == answers
    assert len(output.read_text().splitlines()) == 24
    assert (tmp_path / "printed0").read_text() and not (tmp_path / "printed1").read_text()
