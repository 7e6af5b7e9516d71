"""Adapters and checkpoints of other trainers become folders that transformers loads, bit by bit."""

import json
import math
import shutil
import sys
from collections import OrderedDict
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import convert  # noqa: E402
from conversion import model_folder  # noqa: E402
from conversion.deepspeed import read_zero  # noqa: E402
from conversion.model_folder import read_tensors  # noqa: E402


def save(folder, dtype="float32", tied=False):
    """A small model with odd sizes in a folder, which no number of ranks divides."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=29, hidden_size=12, intermediate_size=7, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, tie_word_embeddings=tied, dtype=dtype,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("a")
    return model


@pytest.fixture
def run(run_script):
    """Runs the script; see `run_script`."""
    return partial(run_script, convert.main)


def assert_equal(folder, expected):
    """The model in a folder has these tensors, to the bit, and transformers loads it."""
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# Adapters


def adapter(base, folder, **changes):
    """An adapter of random numbers, as peft saves it."""
    options = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"]} | changes
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.normal_()
    model.save_pretrained(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True, "alpha_pattern": {"layers.1.mlp.down_proj": 5}, "rank_pattern": {"q_proj": 2}},
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_a_merged_adapter_is_that_of_peft(dtype, changes, run, tmp_path, monkeypatch):
    monkeypatch.setattr(model_folder, "FILE_BYTES", 900)
    save(tmp_path / "base", dtype)
    adapter(tmp_path / "base", tmp_path / "adapter", **changes)
    assert run("merge", tmp_path / "adapter", "--out", tmp_path / "out") == (0, "")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expected = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    changed = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(expected[changed], before[changed])
    assert_equal(tmp_path / "out", expected)
    files = sorted(tmp_path.glob("out/model-*.safetensors"))
    assert len(files) > 2 and all(sum(t.nbytes for t in load_file(file).values()) <= 1400 for file in files)
    assert (tmp_path / "out" / "vocab.txt").read_text() == "a"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize(("base", "asked"), [("bfloat16", None), ("bfloat16", "float32"), ("float32", "float16")])
def test_an_adapter_is_merged_in_float32_and_rounded_once_and_the_config_names_the_dtype(base, asked, run, tmp_path):
    save(tmp_path / "base", base)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    parts = {"torch_dtype": config.pop("dtype"), "part": {"dtype": base}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | parts))
    adapter(tmp_path / "base", tmp_path / "adapter")
    options = () if asked is None else ("--dtype", asked)
    assert run("merge", tmp_path / "adapter", "--out", tmp_path / "out", *options) == (0, "")
    named = json.loads((tmp_path / "out" / "config.json").read_text())
    assert named["torch_dtype"] == named["part"]["dtype"] == (asked or base)
    name, tensors = "model.layers.1.mlp.down_proj", load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    down, up = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    scale = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_alpha"] / len(down)
    weight = dict(read_tensors(tmp_path / "base"))[f"{name}.weight"]
    expected = (weight.float() + up @ down * scale).to(getattr(torch, asked or base))
    assert torch.equal(dict(read_tensors(tmp_path / "out"))[f"{name}.weight"], expected)


def test_what_cannot_be_merged_is_refused(run, tmp_path):
    save(tmp_path / "base")
    adapter(tmp_path / "base", tmp_path / "dora", use_dora=True)
    code, error = run("merge", tmp_path / "dora", "--out", tmp_path / "out")
    assert code == 1 and "use_dora=True: merge this adapter with peft" in error
    adapter(tmp_path / "base", tmp_path / "adapter")
    other = json.loads((tmp_path / "base" / "config.json").read_text()) | {"num_hidden_layers": 1}
    del other["layer_types"]
    Qwen3ForCausalLM(Qwen3Config(**other)).save_pretrained(tmp_path / "other")
    code, error = run("merge", tmp_path / "adapter", "--base", tmp_path / "other", "--out", tmp_path / "out")
    assert code == 1 and "has no place for base_model.model.model.layers.1." in error
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    code, error = run("merge", tmp_path / "adapter", "--out", tmp_path / "out")
    assert (code, error) == (1, f"error: {tmp_path / 'out'} exists; name a folder that does not\n")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    code, error = run("merge", tmp_path / "adapter", "--out", tmp_path / "new")
    assert (code, error) == (1, f"error: {tmp_path / 'adapter'} names no base; name its folder with --base\n")


# verl


@pytest.mark.slow
def test_shards_of_verl_become_the_model(run, torchrun, tmp_path):
    """Sharded over both ranks, and whole on each of them."""
    model = save(tmp_path / "model")
    torchrun(Path(__file__).with_name("verl_on_ranks.py"), tmp_path / "model", tmp_path, "2", "2,1")
    for mesh in ("2", "2,1"):
        beside = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(tmp_path / "model", tmp_path / mesh / "huggingface", ignore=beside)
        assert run("from-verl", tmp_path / mesh, "--out", tmp_path / f"{mesh}-out") == (0, "")
        assert_equal(tmp_path / f"{mesh}-out", model.state_dict())


def test_plain_tensors_of_verl_are_whole_on_every_rank(run, tmp_path):
    """With FSDP1 and one rank a shard, verl 0.9.1 writes the weights in full; buffers always."""
    model, actor = save(tmp_path / "model"), tmp_path / "actor"
    actor.mkdir()
    for rank in range(2):
        torch.save(model.state_dict(), actor / f"model_world_size_2_rank_{rank}.pt")
    command = ("from-verl", actor, "--config", tmp_path / "model", "--out")
    assert run(*command, tmp_path / "out") == (0, "")
    assert_equal(tmp_path / "out", model.state_dict())
    other = model.state_dict() | {"model.norm.weight": torch.zeros(12)}
    torch.save(other, actor / "model_world_size_2_rank_1.pt")
    assert "model.norm.weight is whole on every rank, and not equal there" in run(*command, tmp_path / "new")[1]


# DeepSpeed


class LossScaler:
    """An object with state, of which the files of DeepSpeed hold some."""

    __module__ = "deepspeed.runtime.fp16.loss_scaler"


@contextmanager
def importable():
    """The module of `LossScaler` exists while files are written."""
    names = LossScaler.__module__.split(".")
    with pytest.MonkeyPatch.context() as patch:
        for count in range(1, len(names) + 1):
            patch.setitem(sys.modules, ".".join(names[:count]), SimpleNamespace(LossScaler=LossScaler))
        yield


def cut(weight, ranks):
    """The parts of a weight in stage 3, (ranks, length), the last one padded."""
    length = math.ceil(weight.numel() / ranks)
    return torch.nn.functional.pad(weight.reshape(-1), (0, length * ranks - weight.numel())).view(ranks, length)


def cut_group(weights, ranks, align):
    """The parts of a parameter group in stages 1 and 2, and the elements after each parameter; see `zero_folder`.

    The group is padded to a multiple of 2 ranks and cut into equal parts, without the padding in the last ones.
    """
    gaps = [-weight.numel() % align for weight in weights[:-1]] + [0]
    flat = torch.cat([torch.nn.functional.pad(w.reshape(-1), (0, gap)) for w, gap in zip(weights, gaps, strict=True)])
    length = 2 * math.ceil(len(flat) / (2 * ranks))
    return [flat[rank * length : (rank + 1) * length].clone() for rank in range(ranks)], gaps


def zero_folder(model, folder, stage, ranks, frozen=(), shared=None, align=1, buffers=None):
    """Writes a checkpoint as DeepSpeed 0.19.8 does, with an object of its own.

    The layout was compared with its files: ZeRO 1, 2 and 3 on two and three processes, float32, bfloat16 and float16,
    parameter groups, frozen and tied weights, `round_robin_gradients`, `parameter_alignment`, `sub_group_size` and
    `offload_optimizer`.

    Args:
        align: elements to which stages 1 and 2 align each parameter but the last (`parameter_alignment`).
        buffers: of the model.
    """
    everything = {name: weight.detach() for name, weight in model.named_parameters()}
    weights = {name: weight for name, weight in everything.items() if name not in frozen}
    half, scaler = len(weights) // 2, LossScaler()
    groups = [dict(list(weights.items())[:half]), dict(list(weights.items())[half:])]
    scaler.cur_scale = 1.0
    step = folder / "global_step5"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    flat = [cut_group(list(group.values()), ranks, align) for group in groups]
    for rank in range(ranks):
        parts = {name: cut(everything[name], ranks)[rank] if stage == 3 else everything[name] for name in frozen}
        state = {
            "module": (buffers or {}) | ({} if stage == 3 else everything), "buffer_names": list(buffers or {}),
            "shared_params": shared or {}, "ds_version": "0.19.8", "loss_scaler": scaler,
            "param_shapes": [OrderedDict((name, weight.shape) for name, weight in group.items()) for group in groups],
            "frozen_param_shapes": None if stage == 1 else {name: everything[name].shape for name in frozen} or None,
            "frozen_param_fragments": None if stage == 1 else parts or None,
        }  # fmt: skip
        optimizer = {"zero_stage": stage, "loss_scaler": scaler, "partition_count": ranks}
        if stage == 3:
            own = [[cut(weight, ranks)[rank] for weight in group.values()] for group in groups]
            optimizer["fp32_flat_groups"] = [torch.cat(group) for group in own]
        else:
            optimizer["partition_count"] = [ranks, ranks]
            optimizer["single_partition_of_fp32_groups"] = [part[rank] for part, _ in flat]
            if align > 1:
                optimizer["param_alignment_paddings"] = [gaps for _, gaps in flat]
        place = f"zero_pp_rank_{rank}_"
        with importable():
            torch.save({"optimizer_state_dict": optimizer}, step / f"{place}mp_rank_00_optim_states.pt")
            if stage == 3 or rank == 0:
                torch.save(state, step / f"{place if stage == 3 else ''}mp_rank_00_model_states.pt")


@pytest.mark.parametrize(
    ("stage", "ranks", "frozen", "align"),
    [(1, 1, 0, 1), (2, 2, 0, 1), (2, 3, 2, 1), (2, 2, 0, 4), (1, 3, 2, 8), (3, 2, 0, 1), (3, 3, 2, 1), (3, 11, 0, 1)],
)
def test_a_folder_of_deepspeed_becomes_the_model(stage, ranks, frozen, align, run, tmp_path):
    model = save(tmp_path / "model")
    names = [name for name, _ in model.named_parameters()][:frozen]
    zero_folder(model, tmp_path / "zero", stage, ranks, names, align=align)
    command = ("from-deepspeed", tmp_path / "zero", "--config", tmp_path / "model", "--out")
    assert run(*command, tmp_path / "out") == (0, "")
    assert_equal(tmp_path / "out", model.state_dict())
    assert run(*command, tmp_path / "half", "--dtype", "bfloat16") == (0, "")
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(stored[name], tensor.bfloat16()) for name, tensor in model.state_dict().items())


def test_tied_weights_of_deepspeed(run, tmp_path):
    model = save(tmp_path / "model", tied=True)
    zero_folder(model, tmp_path / "zero", 2, 2, shared={"lm_head.weight": "model.embed_tokens.weight"})
    command = ("from-deepspeed", tmp_path / "zero" / "global_step5", "--config", tmp_path / "model")
    assert run(*command, "--out", tmp_path / "out") == (0, "")
    assert_equal(tmp_path / "out", model.state_dict())


@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_of_integers_stay_as_they_are(stage, tmp_path):
    buffers = {"steps": torch.tensor([2**24 + 1]), "mean": torch.tensor([0.5], dtype=torch.bfloat16)}
    zero_folder(save(tmp_path / "model"), tmp_path / "zero", stage, 2, buffers=buffers)
    found = dict(read_zero(tmp_path / "zero"))
    assert found["steps"].tolist() == [2**24 + 1] and found["steps"].dtype == torch.int64
    assert found["mean"].dtype == torch.float32


class Attack:
    def __reduce__(self):
        return exec, ("raise SystemExit('the file ran code')",)


def test_a_file_cannot_run_code(run, tmp_path):
    zero_folder(save(tmp_path / "model"), tmp_path / "zero", 2, 2)
    file = tmp_path / "zero" / "global_step5" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": Attack()}, file)
    command = ("from-deepspeed", tmp_path / "zero", "--config", tmp_path / "model", "--out", tmp_path / "out")
    code, error = run(*command)
    assert code == 1 and f"{file} is damaged, or would run code" in error
    file.unlink()
    code, error = run(*command)
    assert code == 1 and "has 1 files *_optim_states.pt of 2; copy all of them there" in error
    torch.save({"a": Attack()}, tmp_path / "model_world_size_1_rank_0.pt")
    code, error = run("from-verl", tmp_path, "--config", tmp_path / "model", "--out", tmp_path / "out")
    assert code == 1 and "would run code" in error
