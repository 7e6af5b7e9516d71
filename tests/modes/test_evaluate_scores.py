"""`mode=evaluate` of models that give scores: the numbers of their own runs, and of files of others."""

import io
import json

import pytest
from rich.console import Console

from rft.evaluation.estimators import interval
from rft.modes.evaluate import evaluate
from rft.setup.assembly import Job
from tests.conftest import TINY

ROWS = {
    "reward_model": [
        {
            "prompt": f"reverse {n}=",
            "chosen": str(n)[::-1],
            "rejected": str(n),
            "data_source": "odd" if n % 2 else "even",
        }
        for n in range(10, 20)
    ],
    "process_reward_model": [
        {"prompt": f"reverse {n}=", "completions": [*str(n)], "labels": [n % 3 == 0, False]} for n in range(10, 20)
    ],
}
OTHER = {  # a checkpoint is not what another algorithm trains
    "reward_model": (
        "process_reward_model",
        "Qwen3ForSequenceClassification with 1 labels is no token classifier with 2",
    ),
    "process_reward_model": (
        "reward_model",
        "Qwen3ForTokenClassification with 2 labels is no sequence classifier with 1",
    ),
}
MINE = (
    "data=questions",
    "data.template=none",
    "data.eval.questions.columns.answer=null",
    "metric=eval/questions/accuracy",
)


@pytest.fixture(params=ROWS)
def scorer(request, tiny, resolved, tmp_path):
    """Trains a tiny one; gives the name of its algorithm, the numbers that it logged last, and what evaluates it."""
    Job(tiny(f"algorithm={request.param}", "steps=1", "actor.optimizer.lr=0.01")).fit("")
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])

    def measure(*overrides):
        console = Console(file=io.StringIO(), width=200)
        ours = (f"algorithm={request.param}", f"output_dir={tmp_path / 'run'}")
        found = evaluate(resolved("mode=evaluate", *ours, *overrides), console)
        return found, json.loads((tmp_path / "run" / "evaluation.json").read_text()), console.file.getvalue()

    return request.param, {name: value for name, value in last.items() if name.startswith("eval/")}, measure


def test_the_numbers_are_those_of_the_run_and_those_of_a_file(scorer, tmp_path):
    name, logged, measure = scorer
    found, report, printed = measure(*TINY)
    assert report["numbers"] == logged and found == logged["eval/heldout/accuracy"]
    assert report["model"].endswith("step_00000001/actor") and "samples" not in report and "95 % interval" in printed
    assert measure(*TINY, "evaluate.checkpoint=null")[1]["numbers"] != logged, "the model before it learned"

    other, said = OTHER[name]
    with pytest.raises(ValueError, match=rf"^evaluate\.checkpoint=latest: .*actor: {said}; a run with actor\.head="):
        measure(f"algorithm={other}")

    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    found, report, _ = measure(*MINE, f"data.eval.questions.path={tmp_path / 'mine.jsonl'}")
    lines = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    if name == "reward_model":
        right = [float(good["score"] > bad["score"]) for good, bad in zip(lines[::2], lines[1::2], strict=True)]
        assert report["intervals"]["questions"]["odd"]["accuracy"] == pytest.approx(interval(right[1::2]))
    else:
        right = [
            float((p > 0.5) == label) for line in lines for p, label in zip(line["steps"], line["labels"], strict=True)
        ]
        assert len(right) == 20
    assert found == pytest.approx(sum(right) / len(right))
    assert report["intervals"]["questions"]["all"]["accuracy"] == pytest.approx(interval(right))
