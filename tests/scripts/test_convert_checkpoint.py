"""A checkpoint becomes the folder that its run exports, bit by bit, and a run that starts from it has its weights."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rft.actor.loading import export
from rft.registry import Target
from rft.setup.assembly import Job
from rft.train.checkpoint import shards
from rft.train.checkpoint.manifest import read_manifest, write_manifest
from tests.e2e import runs_on_ranks
from tests.train.checkpoint.states import state

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import convert  # noqa: E402
from conversion import checkpoint  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {
    "vocab_size": 67, "hidden_size": 12, "intermediate_size": 7, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LORA = ("actor/lora=lora", "actor.lora.rank=2", "actor.lora.targets=[q_proj,o_proj]")
FROZEN = "actor.frozen=[model.layers.0.*,model.embed_tokens.*]"
MOE = (
    "actor.model_config.model_type=qwen3_moe",
    "~actor.model_config.head_dim",
    *(f"+actor.model_config.{k}={v}" for k, v in EXPERTS.items()),
)
ALONE, PACKED = "actor.lora.export=adapter", "actor.lora.quantize=nf4"
CASES = {  # the folder of actor.path, and overrides
    "dense": (None, ("actor.ema=0.5",)),
    "tied": (None, ("actor.model_config.tie_word_embeddings=true",)),
    "experts": (None, MOE),
    "adapters": (None, (*LORA, "strategy.dtype=bfloat16")),
    "frozen": (None, (FROZEN,)),
    "critic": (None, ("algorithm=ppo",)),
    "template": (None, ("data.template=turns",)),
    "dtype": (None, ("checkpoint.export_dtype=bfloat16", "actor.ema=0.5")),
    "tied-path": ("tied", ()),
    "score": (None, ("algorithm=reward_model", "eval.every=1")),
    "step": (None, ("algorithm=process_reward_model",)),
    "tied-path-frozen": ("tied", (FROZEN,)),
    "tied-path-adapters": ("tied", (*LORA, "strategy.dtype=bfloat16")),
    "tied-path-adapters-alone": ("tied", (*LORA, ALONE, "actor.ema=0.5")),
    "path-packed": ("plain", (*LORA, PACKED)),
    "path-packed-alone": ("plain", (*LORA, PACKED, ALONE)),
    "path-experts": ("experts", ()),
    "path-experts-adapters": ("experts", LORA),
}
VISION = (
    "actor=tiny_vision", "data=shapes", "data.train.count=16", "data.eval.heldout.count=4", "batch.prompts=4",
    "algorithm.group_size=2", "rollout.max_new_tokens=4", "reward=exact", "actor.ema=0.5",
)  # fmt: skip
SHARDED = (  # with two ranks: every kind of weights once
    "dense", "experts", "score", "tied-path-frozen", "tied-path-adapters-alone", "path-packed", "path-experts-adapters"
)  # fmt: skip
BACK = ("tied", "experts", "score", "step", "tied-path-adapters-alone")


@pytest.fixture
def run(run_script):
    """Runs the section `from-checkpoint`; see `run_script`."""
    return partial(run_script, convert.main, "from-checkpoint")


def save_models(folder):
    """The models that `CASES` name."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(folder / "plain")
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).to(torch.bfloat16).save_pretrained(folder / "tied")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)).save_pretrained(folder / "experts")


def assert_same(folder, other):
    """Two folders have the same files, bit by bit."""
    files = sorted(file.relative_to(other) for file in other.rglob("*"))
    assert files == sorted(file.relative_to(folder) for file in folder.rglob("*"))
    for file in files:
        assert (folder / file).read_bytes() == (other / file).read_bytes(), file


def weights(folder):
    """The weights of the policy in the latest checkpoint of a run."""
    return state(Path(folder))["actors"]["actor"]["network"]


def train_again(config, path, folder):
    """A run of one step from a folder, with a learning rate of 0; returns the weights of its checkpoint."""
    actor = config["actor"] | {"path": str(path), "model_config": None}
    actor["optimizer"] = actor["optimizer"] | {"lr": 0.0}
    Job(config | {"actor": actor, "output_dir": str(folder), "steps": 1}).fit("")
    return weights(folder)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_is_converted_and_back_in_parts(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FILE_BYTES", 30_000)
    monkeypatch.setattr(shards, "FILE_BYTES", 20_000)
    config = tiny("warmup=none", "steps=1", "eval.every=0")
    Job(config).fit("")
    step, loaded = tmp_path / "run" / "checkpoints" / "step_00000001", []

    def load(tensors, folder):
        loaded.append(sum(tensor.nbytes for tensor in tensors.values()))
        shards.load_tensors(tensors, folder)

    monkeypatch.setattr(checkpoint, "load_tensors", load)
    assert run(step, "--out", tmp_path / "model") == (0, "")
    assert_same(tmp_path / "model", step / "actor")
    assert len(loaded) > 3 and max(loaded) <= 20_000
    assert_equal(train_again(config, tmp_path / "model", tmp_path / "again"), weights(tmp_path / "run"))

    assert run(step, "--out", tmp_path / "half", "--dtype", "bfloat16") == (0, "")
    whole, half = ({k: t for f in folder.glob("*.safetensors") for k, t in load_file(f).items()}
                   for folder in (tmp_path / "model", tmp_path / "half"))  # fmt: skip
    assert_equal(half, {name: tensor.bfloat16() for name, tensor in whole.items()})
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"

    assert run(step, "--out", tmp_path / "half") == (
        1,
        f"error: {tmp_path / 'half'} exists; name a folder that does not\n",
    )
    code, error = run(step, "--out", tmp_path / "average", "--average")
    assert code == 1 and "has no average of the weights (actor.ema=null); leave out --average" in error
    file = max(step.glob("*.safetensors"))
    flipped = bytearray(file.read_bytes())
    flipped[-1] ^= 1
    file.write_bytes(flipped)
    code, error = run(step, "--out", tmp_path / "damaged")
    assert code == 1 and f"{step} is no whole checkpoint: {file.name} has changed since it was written" in error
    code, error = run(tmp_path / "run", "--out", tmp_path / "damaged")
    assert code == 1 and "MANIFEST.json is missing; name a folder checkpoints/step_<number> of a run" in error
    assert not (tmp_path / "damaged").exists()


def test_a_checkpoint_names_only_the_classes_of_a_policy(run, tiny, tmp_path):
    """A reward runs the functions of its terms, and so no class of a reward may be the tokenizer of a checkpoint."""
    Job(tiny("warmup=none", "steps=1", "eval.every=0", "checkpoint.export_every=2")).fit("")
    step, ran = tmp_path / "run" / "checkpoints" / "step_00000001", tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\ndef f(response, row): return 0.0\n")
    facts = read_manifest(step)
    config, file = facts["config"], f"{tmp_path / 'evil.py'}:f"
    attack = {**config["reward"], "accuracy": "f", "terms": {"f": {"function": file, "weight": 1.0}}}
    Target(attack, "actor.tokenizer").build()
    assert ran.exists(), "to build the class runs the file"
    ran.unlink()
    attacks = {
        "actor.tokenizer._target_": {"tokenizer": attack},
        "actor.lora.targets.0._target_": {"lora": {"targets": [attack]}},
        "actor._target_": {"_target_": attack["_target_"]},
    }
    for key, part in attacks.items():
        write_manifest(step, facts["files"], {**facts, "config": config | {"actor": config["actor"] | part}})
        code, error = run(step, "--out", tmp_path / "model")
        assert code == 1 and f"{step} has {key}={attack['_target_']}: a checkpoint may come from an untrusted" in error
        assert not ran.exists()
    trusting = config | {"actor": config["actor"] | {"trust_remote_code": True}}
    write_manifest(step, facts["files"], {**facts, "config": trusting})
    code, error = run(step, "--out", tmp_path / "model")
    assert code == 1 and f"{step} has actor.trust_remote_code=True: a checkpoint may come" in error
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    shutil.copy(tmp_path / "evil.py", hidden)
    named = {"model_type": "own", "auto_map": {"AutoConfig": "evil.f", "AutoTokenizer": ["evil.f", None]}}
    for name in ("config.json", "tokenizer_config.json"):
        (hidden / name).write_text(json.dumps(named))
    trusting = {"path": str(hidden), "trust_remote_code": True}
    tokenizer = {"_target_": "rft.data.encode.tokenizer.pretrained", **trusting}
    changed = config | {"actor": config["actor"] | {"tokenizer": tokenizer}}
    write_manifest(step, facts["files"], {**facts, "config": changed})
    code, error = run(step, "--out", tmp_path / "model")
    assert code == 1 and f"{step} has actor.tokenizer.trust_remote_code=True: a checkpoint may" in error
    assert not ran.exists()
    foreign = {"_target_": "subprocess.check_call", "popenargs": ["true"]}
    for key in ("actor", "strategy"):
        write_manifest(step, facts["files"], {**facts, "config": config | {key: foreign}})
        code, error = run(step, "--out", tmp_path / "model")
        assert code == 1 and f"{step} has {key}._target_=subprocess.check_call" in error
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_the_dtype_of_exports_changes_no_weight_of_the_run(tiny, run, tmp_path):
    Job(tiny("warmup=none", "steps=2", f"output_dir={tmp_path / 'whole'}")).fit("")
    half = "checkpoint.export_dtype=bfloat16"
    Job(tiny("warmup=none", "steps=1", half)).fit("")
    first = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert run(first, "--out", tmp_path / "model", "--dtype", "float32") == (0, "")
    exact, written = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", first / "actor"))
    assert_equal(written, {name: tensor.bfloat16() for name, tensor in exact.items()})
    assert not any(torch.equal(written[name].float(), tensor) for name, tensor in exact.items() if "proj" in name)
    Job(tiny("warmup=none", "steps=2")).fit("")
    assert_equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert {
        tensor.dtype for tensor in load_file(tmp_path / "run/checkpoints/latest/actor/model.safetensors").values()
    } == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_becomes_what_its_run_exports(ranks, run, resolved, sized, torchrun, tmp_path):
    save_models(tmp_path)
    configs = {}
    for name, (path, overrides) in CASES.items() if ranks == 1 else [(name, CASES[name]) for name in SHARDED]:
        where = (f"output_dir={tmp_path / 'runs' / name}", "warmup=none", "steps=1")
        given = () if path is None else (f"actor.path={tmp_path / path}", "actor.model_config=null")
        configs[name] = resolved(*sized(*given, *overrides, *where))
    configs["vision"] = resolved(*VISION, f"output_dir={tmp_path / 'runs' / 'vision'}", "warmup=none", "steps=1")
    if ranks == 1:
        for config in configs.values():
            Job(config).fit("")
    else:
        file = tmp_path / "configs.json"
        file.write_text(json.dumps(list(configs.values())))
        torchrun(Path(runs_on_ranks.__file__), file)
    for name, config in configs.items():
        step, out = Path(config["output_dir"]) / "checkpoints" / "latest", tmp_path / "out" / name
        assert run(step, "--out", out) == (0, ""), name
        assert_same(out, step / "actor")
        if config["actor"]["ema"]:
            assert run(step, "--out", out.with_name("average"), "--average") == (0, "")
            assert_same(out.with_name("average"), step / "actor_ema")
            out.with_name("average").rename(out.with_name(f"{name}-average"))
    for name in BACK if ranks == 1 else ():
        again = train_again(configs[name], tmp_path / "out" / name, tmp_path / "again" / name)
        assert_equal(again, weights(configs[name]["output_dir"]))
