"""A folder whose model needs python files of its own: refused, and with trust_remote_code trained and exported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from rft.data.encode.tokenizer import characters
from rft.errors import Problems
from rft.modes.evaluate import evaluate
from rft.setup.assembly import Job
from tests.e2e.own_model import OwnConfig
from tests.helpers import SIZES

CODE = Path(__file__).parent / "own_model.py"
ALPHABET = "0123456789 =adeorstublv\n"
SHORT = ("actor=hf", "data.train.count=48", "data.eval.heldout.count=8", "steps=1", "batch.prompts=4",
         "batch.minibatches=1", "rollout.max_new_tokens=4")  # fmt: skip
SAMPLED = (*SHORT, "algorithm.group_size=2", "algorithm/terms=[entropy,kl]")


@pytest.fixture
def folder(tmp_path):
    """A model folder as `save_pretrained` writes it, with the file that its config names."""
    made = tmp_path / "model"
    tokenizer = characters(alphabet=ALPHABET)
    tokenizer.save_pretrained(made)
    config = OwnConfig(
        **SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "initializer_range": 0.2}
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(made)
    shutil.copy(CODE, made / "own_model.py")
    named = json.loads((made / "config.json").read_text())
    named |= {"auto_map": {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnModel"}}
    (made / "config.json").write_text(json.dumps(named | {"model_type": "own_model"}))
    return made


def test_the_code_is_refused_by_name(folder, resolved, tmp_path):
    with pytest.raises(Problems) as found:
        Job(resolved(*SAMPLED, f"actor.path={folder}", f"output_dir={tmp_path / 'run'}")).fit("")
    assert any(
        message.startswith(f"actor.path: no model can be read from {str(folder)!r} (it needs python files of its own")
        and "set actor.trust_remote_code=true" in message
        for message in found.value.messages
    )
    term = ("reward/terms=[exact_match,judge]", f"reward.terms.judge.path={folder}", "reward.accuracy=exact_match")
    with pytest.raises(Problems, match=r"set reward\.terms\.judge\.trust_remote_code=true"):
        Job(resolved(*term, f"output_dir={tmp_path / 'run'}")).fit("")
    assert not (tmp_path / "run").exists()


def test_a_trusted_model_trains_and_keeps_its_code(folder, resolved, tmp_path):
    trusted = (*SAMPLED, f"actor.path={folder}", "actor.trust_remote_code=true", f"output_dir={tmp_path / 'run'}")
    Job(resolved(*trusted)).fit("")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    [trained] = [row for row in rows if "grad_norm" in row]
    assert trained["grad_norm"] > 0 and trained["rollout/logprob_gap"] < 1e-5 and "loss/kl" in trained
    exported = tmp_path / "run" / "checkpoints" / "latest" / "actor"
    assert (exported / "own_model.py").read_text() == CODE.read_text()
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    assert type(model).__name__ == "OwnModel" and type(model.config).__name__ == "OwnConfig"
    before = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).state_dict()
    assert not torch.equal(before["lm_head.weight"], model.state_dict()["lm_head.weight"])
    evaluate(resolved(*trusted, "mode=evaluate"), Console(quiet=True))
    taught = ("algorithm=on_policy_distill", f"teacher.path={exported}", f"output_dir={tmp_path / 'again'}")
    Job(resolved(*SHORT, f"actor.path={exported}", "actor.trust_remote_code=true", *taught)).fit("")
    assert (tmp_path / "again" / "checkpoints" / "latest" / "actor" / "own_model.py").is_file()
