"""A run that was interrupted ends as if it had not been, and every run has a folder of its own."""

import pytest

from rft.setup.assembly import Job
from rft.train.trainer import Trainer
from tests.helpers import ADAPTIVE, CLOCK, Interrupted, identical, interrupt, numbers, worst
from tests.train.checkpoint.states import state

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


LORA = ("actor/lora=lora", "actor.lora.rank=4", "actor.optimizer.lr=1e-2")
RUNS = {
    "grpo within the warm-up": ((), 2),
    "grpo at the boundary": ((), 4),
    "grpo in training": ((), 6),
    "grpo in its first step of training": ((), 5),
    "prime with its reward model": (("algorithm=prime",), 6),
    "spo with what it knows of the prompts": (("algorithm=spo", "algorithm.group_size=1"), 6),
    "vapo at the end of the critic's warm-up": (("algorithm=vapo", "algorithm.critic_warmup=1"), 6),
    "grpo from a checkpoint two steps back": (("checkpoint.every=4",), 6),
    "grpo with several updates a step": (("batch.minibatches=2", "batch.epochs=2"), 6),
    "grpo with adaptive KL": (ADAPTIVE, 6),
    "rloo with running moments of its scores": (("algorithm=rloo", "algorithm/shaping=[running_norm]"), 6),
    "dapo with groups that wait": (("algorithm=dapo", "algorithm.source.redraw.max_rounds=6", "seed=1"), 6),
    "ppo with critic and reference": (("algorithm=ppo", "algorithm/terms=[kl,entropy]", "batch.minibatches=2"), 6),
    "ppo without a warm-up": (("algorithm=ppo", "algorithm/terms=[kl]", "warmup=none"), 3),
    "reinforce_pp at the boundary": (("algorithm=reinforce_pp",), 4),
    "sft": (("algorithm=sft",), 3),
    "adapters with their reference": ((*LORA, "algorithm/terms=[kl]", "algorithm.iteration=2"), 6),
    "adapters in 4 bits at the boundary": ((*LORA, "actor.lora.quantize=nf4", "algorithm/terms=[kl]"), 4),
    "adapters without a warm-up": ((*LORA, "algorithm/terms=[kl]", "warmup=none"), 3),
    "adapters of every model": (("algorithm=prime", *LORA, "actor/lora@prm.lora=lora", "prm.lora.rank=2"), 6),
    "adapters of the critic": (("algorithm=ppo", "actor/lora@critic.lora=lora", "critic.lora.rank=2"), 6),
    "sppo in its second iteration": (("algorithm=sppo", "algorithm.iteration=2", "warmup=none"), 4),
    "dpo with what its reference said": (("algorithm=dpo", "reference.precompute=true", "warmup=none"), 3),
    "gkd between given and sampled steps": (("algorithm=gkd", "warmup=none"), 3),
}


@pytest.mark.parametrize(("overrides", "step"), RUNS.values(), ids=RUNS.keys())
def test_an_interrupted_run_ends_as_if_it_had_not_been(overrides, step, tiny, tmp_path, monkeypatch):
    """The step fails after the batch is drawn and scored: nothing of that may last."""
    warm = () if {"warmup=none", "algorithm=sft"} & set(overrides) else ("warmup.steps=3",)
    given = ("steps=4", *warm, "checkpoint.every=1", "checkpoint.keep_last=99", "eval.every=2", "eval.samples=2",
             "eval.pass_k=[1,2]", *overrides)  # fmt: skip
    whole, parts = tiny(*given), tiny(*given)
    whole["output_dir"], parts["output_dir"] = str(tmp_path / "whole"), str(tmp_path / "parts")
    result = Job(whole).fit("")
    with monkeypatch.context() as patch:
        interrupt(patch, step)
        with pytest.raises(Interrupted):
            Job(parts).fit("")
    assert not (tmp_path / "parts" / "result.json").exists()
    assert Job(parts).fit("") == result
    assert not (tmp_path / "parts-2").exists()
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    one, other = state(tmp_path / "parts"), state(tmp_path / "whole")
    for saved in (one, other):
        saved["numbers"] = {k: v for k, v in saved["numbers"].items() if not k.startswith(CLOCK)}
    assert identical(one, other)
    moved = [row["grad_norm"] for row in numbers(tmp_path / "whole") if "grad_norm" in row]
    assert all(norm > 0 for norm in moved), "the run did train"
    texts = [sorted(path.name for path in (tmp_path / run / "trajectories").iterdir()) for run in ("whole", "parts")]
    assert texts[0] == texts[1]
    assert worst(tmp_path / "parts") == worst(tmp_path / "whole")


def test_dynamic_sampling_has_groups_that_wait(tiny, tmp_path):
    """So that the test above has something to lose."""
    Job(tiny("algorithm=dapo", "algorithm.source.redraw.max_rounds=6", "seed=1", "steps=4")).fit("")
    assert state(tmp_path / "run")["source"]["surplus"]


def test_a_run_that_was_killed_after_its_last_checkpoint_only_ends(tiny, tmp_path, monkeypatch):
    config = tiny()
    with monkeypatch.context() as patch:
        patch.setattr("rft.setup.assembly.finish_folder", lambda *_: (_ for _ in ()).throw(Interrupted))
        with pytest.raises(Interrupted):
            Job(config).fit("")
    before = numbers(tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()  # it is written before the result
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", lambda *_: pytest.fail("it trained again"))
        result = Job(config).fit("")
    assert numbers(tmp_path / "run") == before
    assert result == before[-1]["eval/heldout/accuracy"]
    assert (tmp_path / "run" / "report.html").exists() and (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "run-2").exists()


def test_a_finished_run_keeps_its_folder(tiny, tmp_path):
    config = tiny("steps=1", "warmup=none")
    first = Job(config).fit("")
    kept = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert Job(config).fit("") == first
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == kept
    assert numbers(tmp_path / "run-2") == numbers(tmp_path / "run")


def test_another_config_takes_a_folder_of_its_own(tiny, tmp_path, monkeypatch):
    given = ("steps=3", "warmup=none", "checkpoint.every=1")
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        with pytest.raises(Interrupted):
            Job(tiny(*given)).fit("")
    Job(tiny(*given, "actor.optimizer.lr=1e-3")).fit("")
    assert [row["step"] for row in numbers(tmp_path / "run")] == [0, 1]
    assert [row["step"] for row in numbers(tmp_path / "run-2")] == [0, 1, 2, 3]


def test_a_job_of_a_sweep_has_a_suffix(tiny, tmp_path):
    Job(tiny("steps=1", "warmup=none")).fit("+lr=1")
    assert (tmp_path / "run+lr=1" / "result.json").exists()
