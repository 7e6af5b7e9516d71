"""The options of FSDP2: what does not go together, those of models that only score, and the peak speed of a device."""

from dataclasses import replace

import pytest
import torch

from rft.distributed import start
from rft.errors import Problems
from rft.strategy.base import StrategyOptions
from rft.strategy.fsdp2_options import known_peak
from tests.helpers import make_strategy, strategy_options


def test_options_that_do_not_go_together_are_all_named():
    options = strategy_options(
        accumulate="whole", reduce_dtype="bfloat16", compile=True, activation_checkpointing="selective",
        param_offload="all", optimizer_offload=True, activation_offload=True,
    )  # fmt: skip
    with pytest.raises(Problems) as refused:
        options.check({})
    beginnings = (
        "strategy.accumulate=whole adds up micro-batches in strategy.reduce_dtype=bfloat16, which loses small",
        "strategy.activation_checkpointing=selective cannot see the operations of compiled blocks",
        "strategy.optimizer_offload=true: with strategy.param_offload=all the optimizer state is in host",
        "strategy.activation_offload=true cannot move the results that strategy.activation_checkpointing=selective",
    )
    for message, beginning in zip(refused.value.messages, beginnings, strict=True):
        assert message.startswith(beginning) and "; set strategy." in message
    strategy_options().check({})


def test_a_model_that_scores_is_sharded_over_all_ranks_of_a_group_in_its_own_dtype():
    run = strategy_options(tensor_parallel=2, replicas=2, compile=True, reshard_after_forward=False)
    options = replace(run, activation_offload=True, optimizer_offload=True).scoring_options("bfloat16", True)
    changed = {"dtype": "bfloat16", "tensor_parallel": 1, "compile": False, "reshard_after_forward": True}
    assert options == replace(run, **changed, param_offload="all")
    assert run.scoring_options("float32", False).param_offload == "none"


def test_a_strategy_that_cannot_shard_such_a_model_says_so():
    plain = StrategyOptions()
    assert plain.scoring_options("float32", False) is plain
    with pytest.raises(ValueError, match=r"^reward\.shard=true: the strategy \(.*\) cannot compute in bfloat16; set"):
        plain.scoring_options("bfloat16", False)
    with pytest.raises(ValueError, match=r"cannot compute with weights in host memory; set reward\.shard=false"):
        plain.scoring_options("float32", True)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_known_gpus(device: str, peak: float | None) -> None:
    assert known_peak(device, torch.bfloat16) == known_peak(device, torch.float16) == peak
    assert known_peak(device, torch.float32) is None


def test_the_option_counts_before_what_is_known() -> None:
    world = start("cpu")
    assert make_strategy(world).peak_tflops() is None
    assert make_strategy(world, peak_tflops=0.5).peak_tflops() == 0.5
