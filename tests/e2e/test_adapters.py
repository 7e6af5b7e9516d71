"""Runs with adapters that are exported alone: such a folder can be evaluated, trained on, or be where a run starts."""

import io
import json

import pytest
from rich.console import Console

from rft.actor.init import load_model, read_config
from rft.modes.evaluate import evaluate
from rft.setup.assembly import Job

pytestmark = pytest.mark.slow
EXPORTED = ("actor/lora=lora", "actor.lora.rank=2", "actor.lora.export=adapter", "actor.optimizer.lr=0.05")


@pytest.fixture
def on_base(tiny, tmp_path):
    """Composes a tiny run, without a warm-up, of the model in a folder; by default of a base."""
    options = tiny()["actor"]["model_config"]
    load_model(None, read_config(None, options, 128, "actor"), 3).save_pretrained(tmp_path / "base")

    def compose(*overrides, path=tmp_path / "base", name="run"):
        where = (f"actor.path={path}", "actor.model_config=null", f"output_dir={tmp_path / name}")
        return tiny("warmup=none", "eval.every=1", "eval.samples=4", *where, *overrides)

    return compose


def evaluations(folder):
    """What each step has logged of the held-out set."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name.startswith("eval/")} for row in rows]


def evaluated(config):
    """What mode=evaluate finds."""
    evaluate(config, Console(file=io.StringIO()))
    with open(f"{config['output_dir']}/evaluation.json") as file:
        return json.load(file)["numbers"]


@pytest.mark.parametrize("quantize", ["null", "nf4"])
def test_an_exported_adapter_is_evaluated_and_trains_on(on_base, tmp_path, quantize):
    packed = f"actor.lora.quantize={quantize}"
    Job(on_base(*EXPORTED, packed)).fit("")
    first, adapter = evaluations(tmp_path / "run"), tmp_path / "run" / "checkpoints" / "latest" / "actor"
    assert first[0] != first[-1] and not (adapter / "config.json").exists()
    if quantize == "null":
        assert evaluated(on_base("mode=evaluate")) == first[-1]
    Job(on_base(*EXPORTED, packed, "steps=1", path=adapter, name="second")).fit("")
    second = evaluations(tmp_path / "second")
    assert second[0] == first[-1]
    written = json.loads((tmp_path / "second/checkpoints/latest/actor/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "base")


def test_a_run_without_adapters_starts_from_base_and_adapter(on_base, tmp_path):
    Job(on_base(*EXPORTED)).fit("")
    adapter = tmp_path / "run" / "checkpoints" / "latest" / "actor"
    Job(on_base("algorithm/terms=[kl]", "steps=1", path=adapter, name="second")).fit("")
    assert evaluations(tmp_path / "second")[0] == evaluations(tmp_path / "run")[-1]
    assert (tmp_path / "second/checkpoints/latest/actor/config.json").is_file()
