"""What the strategy decides on this machine: written into the config, and kept by a run that is continued."""

import pytest
import torch
from omegaconf import OmegaConf

from rft.train.folder.settled import settle
from tests.conftest import CONFIG, composed


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU of a compute capability."""

    def there(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    return there


def settled(tmp_path, *overrides):
    config = composed(("rollout=vllm", f"output_dir={tmp_path}", *overrides), CONFIG, "main")
    lines = settle(config)
    assert config.rollout.engine_args.dtype == config.strategy.dtype, "what takes its value over has it too"
    return config.strategy.dtype, lines


@pytest.mark.parametrize(
    ("capability", "overrides", "dtype"),
    [
        (None, (), "float32"),
        ((9, 0), (), "bfloat16"),
        ((8, 0), (), "bfloat16"),
        ((7, 5), (), "float32"),
        ((9, 0), ("strategy.device=cpu",), "float32"),
    ],
)
def test_auto_is_bfloat16_on_a_gpu_that_has_it(tmp_path, gpu, capability, overrides, dtype):
    if capability is not None:
        gpu(capability)
    said = "" if capability is None else f"strategy.dtype=auto: {dtype}"  # without a GPU there is no choice
    assert settled(tmp_path, *overrides) == (dtype, {"dtype": said})


def test_a_gpu_that_a_plan_alone_names_has_bfloat16(tmp_path):
    assert settled(tmp_path, "mode=plan", "strategy.device=cuda")[0] == "bfloat16"


def test_what_is_given_stays(tmp_path, gpu):
    gpu((9, 0))
    for dtype in ("float32", "float16"):
        assert settled(tmp_path, f"strategy.dtype={dtype}") == (dtype, {})
    assert settled(tmp_path, "strategy=bf16") == ("bfloat16", {})


def test_a_run_that_is_continued_keeps_its_dtype_on_another_machine(tmp_path):
    node = {"_target_": "rft.strategy.fsdp2.FSDP2", "dtype": "bfloat16"}
    OmegaConf.save(OmegaConf.create({"strategy": node}), tmp_path / "config.yaml")
    kept = {"dtype": "strategy.dtype=auto: bfloat16, as the run in output_dir"}
    assert settled(tmp_path) == ("bfloat16", kept)
    assert settled(tmp_path, "resume=never") == ("float32", {"dtype": ""})
    OmegaConf.save(OmegaConf.create({"strategy": node | {"_target_": "another.Strategy"}}), tmp_path / "config.yaml")
    assert settled(tmp_path)[0] == "float32"


def test_a_mistake_is_left_for_the_checks(tmp_path):
    config = composed((f"output_dir={tmp_path}", "strategy._target_=no.such.Class"), CONFIG, "main")
    assert settle(config) == {} and config.strategy.dtype == "auto"
