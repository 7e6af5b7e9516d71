"""Float8 layers: where they are refused, and, in a process with torchao, what they compute."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rft.distributed import start
from rft.errors import Problems
from rft.setup.assembly import Job
from rft.strategy.base import ModelFacts
from rft.strategy.fp8 import can_convert, check_layers
from tests.conftest import ENDS_S
from tests.helpers import MODEL, make_actor, make_optimizer, make_strategy, strategy_options

FOLDER = os.environ.get("RFT_TORCHAO_DIR", "")
POLICY = {"actor": ModelFacts("lm", optimizers={"actor": "adamw"})}


@pytest.fixture
def machine(monkeypatch):
    """What torch answers about the device, and whether torchao is installed."""

    def become(capability, torchao=True):
        find = importlib.util.find_spec
        answer = {"torchao": "found" if torchao else None}
        monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: answer.get(name) or find(name, *a))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return become


def errors(models=POLICY, **changes):
    options = strategy_options(**{"fp8": "rowwise", "dtype": "bfloat16", "device": "cuda"} | changes)
    try:
        options.check(models)
    except Problems as refused:
        return refused.messages
    return []


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_a_gpu_with_float8_is_not_refused(machine, capability):
    machine(capability)
    assert errors() == errors(device="auto", compile=True, context_parallel=2, expert_parallel=2) == []
    assert errors(fp8=None, dtype="float32", device="cpu") == []
    frozen = ModelFacts("lm", lora=True, media=True)  # a reference trains nothing, so it has no such layer
    assert errors(POLICY | {"reference": frozen}) == []


def test_an_older_gpu_is_refused(machine):
    machine((8, 6))
    assert errors() == [
        "strategy.fp8=rowwise: float8 needs a GPU of compute capability 8.9 or more, and this one has 8.6; set "
        "strategy.fp8=null"
    ]


def test_a_plan_for_a_gpu_that_this_machine_lacks_is_not_refused(machine):
    machine(None)
    assert errors() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, "computes in bfloat16 then, and strategy.dtype is float32; set strategy=bf16 (strat"),
        ({"dtype": "float16"}, "computes in bfloat16 then, and strategy.dtype is float16; set strategy=bf16 (strat"),
        ({"tensor_parallel": 2}, "that strategy.tensor_parallel=2 splits have a forward of their own; set strategy"),
        ({"models": {"critic": ModelFacts("value", lora=True, optimizers={"critic": "muon"})}}, "set critic.lora=null"),
        ({"models": {"actor": ModelFacts("lm", media=True, optimizers={"actor": "adamw"})}}, "takes media (actor.pro"),
    ],
)
def test_what_does_not_go_with_float8_is_refused(machine, changes, said):
    machine((9, 0))
    (error,) = errors(**changes)
    assert error.startswith("strategy.fp8=rowwise: ") and said in error and error.endswith("strategy.fp8=null")


def test_a_run_names_every_reason_at_once(resolved, machine):
    machine(None, torchao=False)
    with pytest.raises(Problems) as refused:
        Job(resolved("strategy.fp8=tensorwise", "strategy.device=cpu"))
    for said in (
        "strategy.fp8=tensorwise: float8 needs a GPU, and with strategy.device=cpu this machine computes on its CPU; ",
        'strategy.fp8=tensorwise needs torchao: pip install "rft[fp8]", or set strategy.fp8=null',
        "strategy.fp8=tensorwise: the rest of the model computes in bfloat16 then, and strategy.dtype is float32; ",
    ):
        assert said in str(refused.value)


def test_layers_are_linear_train_have_fitting_sizes_and_choose_no_expert():
    class Own(nn.Linear):
        pass

    layer = nn.Linear(32, 48)
    assert can_convert(layer, "self_attn.q_proj") and can_convert(layer, "mlp.gate_proj")
    assert not can_convert(layer, "mlp.gate") and not can_convert(layer, "mlp.router.layer")
    for other in (nn.Linear(24, 48), nn.Linear(48, 24), Own(32, 48), nn.Embedding(32, 48), nn.Conv1d(32, 48, 1)):
        assert not can_convert(other, "mlp.up_proj")
    layer.requires_grad_(False)
    assert not can_convert(layer, "mlp.up_proj")


FITTING = MODEL | {"hidden_size": 32, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("key", "head", "model", "frozen"),
    [("actor", "lm", MODEL, []), ("critic", "value", MODEL, []), ("actor", "lm", FITTING, ["model.layers.*_proj.*"])],
    ids=["actor", "critic", "frozen"],
)
def test_a_model_that_trains_without_such_a_layer_is_refused_before_it_is_loaded(key, head, model, frozen):
    world = start("cpu")
    strategy = make_strategy(world, dtype="bfloat16", fp8="rowwise")
    options = {"key": key, "head": head, "model_config": model, "frozen": frozen}
    said = rf"^strategy\.fp8=rowwise: Qwen3Model of {key} has no linear layer \(nn\.Linear\) that trains and whose two"
    with pytest.raises(ValueError, match=rf"{said} .* multiples of 16; set strategy\.fp8=null$"):
        make_actor(world, strategy, make_optimizer(), **options)


def test_one_such_layer_is_enough_and_a_model_that_only_scores_needs_none():
    check_layers(nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 32)), "rowwise", "actor")
    check_layers(nn.Linear(24, 16).requires_grad_(False), "rowwise", "reference")


def test_models_that_others_are_compared_with_have_no_float8():
    options = strategy_options(dtype="bfloat16", fp8="rowwise")
    assert options.reference_options("bfloat16").fp8 is None
    assert options.scoring_options("bfloat16", False).fp8 is None


@pytest.mark.slow
@pytest.mark.skipif(
    not FOLDER and importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed, and RFT_TORCHAO_DIR names no folder (.ci/run prepares one)",
)
def test_layers_of_torchao_on_a_cpu() -> None:
    root, checks = Path(__file__).parents[2], str(Path(__file__).parent / "float8" / "checks.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--show-capture=no", checks],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), FOLDER]), "OMP_NUM_THREADS": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=ENDS_S,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
