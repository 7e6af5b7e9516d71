"""A checkpoint becomes the folder that its run exports, bit by bit, and a run that starts from it has its weights."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rft.setup.assembly import Job
from rft.train.checkpoint.checkpoints import SavedState
from tests.e2e import runs_on_ranks

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import convert  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {
    "vocab_size": 67, "hidden_size": 12, "intermediate_size": 7, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LORA = ("actor/lora=lora", "actor.lora.rank=2", "actor.lora.targets=[q_proj,o_proj]")
FROZEN = "actor.frozen=[model.layers.0.*,model.embed_tokens.*]"
MOE = ("actor.model_config.model_type=qwen3_moe", "~actor.model_config.head_dim", *(f"+actor.model_config.{k}={v}" for k, v in EXPERTS.items()))
ALONE, PACKED = "actor.lora.export=adapter", "actor.lora.quantize=nf4"
CASES = {  # the folder of actor.path, and overrides
    "dense": (None, ("actor.ema=0.5",)),
    "tied": (None, ("actor.model_config.tie_word_embeddings=true",)),
    "experts": (None, MOE),
    "adapters": (None, (*LORA, "strategy.dtype=bfloat16")),
    "frozen": (None, (FROZEN,)),
    "critic": (None, ("algorithm=ppo",)),
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


@pytest.fixture
def run(monkeypatch, capsys):
    def command(*arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
        try:
            convert.main()
            code = 0
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().err
    return command


def models(folder):
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(folder / "plain")
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).to(torch.bfloat16).save_pretrained(folder / "tied")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)).save_pretrained(folder / "experts")


def assert_same(folder, other):
    files = sorted(file.relative_to(other) for file in other.rglob("*"))
    assert files == sorted(file.relative_to(folder) for file in folder.rglob("*"))
    for file in files:
        assert (folder / file).read_bytes() == (other / file).read_bytes(), file


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_becomes_what_its_run_exports(ranks, run, resolved, sized, torchrun, tmp_path):
    models(tmp_path)
    configs = {}
    for name, (path, overrides) in CASES.items():
        where = (f"output_dir={tmp_path / 'runs' / name}", "warmup=none", "steps=1")
        given = () if path is None else (f"actor.path={tmp_path / path}", "actor.model_config=null")
        configs[name] = resolved(*sized(*given, *overrides, *where))
    if ranks == 1:
        for config in configs.values():
            Job(config).fit("")
    else:
        file = tmp_path / "configs.json"
        file.write_text(json.dumps(list(configs.values())))
        torchrun(Path(runs_on_ranks.__file__), file)
    for name, config in configs.items():
        checkpoint, out = Path(config["output_dir"]) / "checkpoints" / "latest", tmp_path / "out" / name
        assert run("from-checkpoint", checkpoint, "--out", out) == (0, ""), name
        print(name)
        assert_same(out, checkpoint / "actor")
        if config["actor"]["ema"]:
            assert run("from-checkpoint", checkpoint, "--out", tmp_path / "ema" / name, "--average") == (0, "")
            assert_same(tmp_path / "ema" / name, checkpoint / "actor_ema")
