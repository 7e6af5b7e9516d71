"""Groups of ranks: the numbers that go together, and what does not go with weights that are split."""

import pytest

from rft.strategy.base import ModelFacts
from rft.strategy.parallel.groups import check_groups, split_errors

ALONE = {"replicas": 1, "context_parallel": 1, "tensor_parallel": 1, "expert_parallel": 1}


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tensor_parallel": 2, "replicas": 4},
        {"expert_parallel": 4, "replicas": 2},
        {"expert_parallel": 8, "context_parallel": 4},
    ],
)
def test_numbers_that_go_together(sizes):
    check_groups(8, ALONE | sizes, compile=False)


@pytest.mark.parametrize(
    ("sizes", "compile", "complaint"),
    [
        ({"replicas": 3}, False, "strategy.replicas=3 does not divide the 8 processes; choose a divisor"),
        ({"expert_parallel": 16}, False, "strategy.expert_parallel=16 does not divide the 8 processes; choose a"),
        (
            {"tensor_parallel": 4, "replicas": 4},
            False,
            "strategy.replicas=4 times strategy.tensor_parallel=4 does not divide the 8 processes; make one",
        ),
        (
            {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 2},
            False,
            "strategy.tensor_parallel=2 does not go with strategy.context_parallel, strategy.expert_parallel; leave ",
        ),
        ({"tensor_parallel": 2}, True, "strategy.tensor_parallel=2 does not go with strategy.compile; leave strategy"),
        ({"expert_parallel": 2}, True, "strategy.expert_parallel=2 does not go with strategy.compile; leave strategy"),
    ],
)
def test_numbers_that_do_not_go_together(sizes, compile, complaint):
    with pytest.raises(ValueError) as caught:
        check_groups(8, ALONE | sizes, compile)
    assert str(caught.value).startswith(complaint)


def test_what_cannot_train_or_hold_split_weights():
    muon = ModelFacts("lm", optimizers={"actor": "muon"})
    packed = ModelFacts("lm", lora=True, optimizers={"critic": "adamw"}, quantized=True)
    models = {"actor": muon, "critic": packed}
    assert split_errors({"tensor_parallel": 1, "expert_parallel": 1}, models) == []
    split = split_errors({"tensor_parallel": 2, "expert_parallel": 1}, models)
    assert [error.partition(":")[0] for error in split] == ["actor.optimizer.name=muon", "critic.lora.quantize"]
    assert split[1].endswith("set critic.lora.quantize=null, or strategy.tensor_parallel=1")
    (only,) = split_errors({"tensor_parallel": 1, "expert_parallel": 2}, models)
    assert only.endswith("and strategy.expert_parallel=2 splits them; set actor.optimizer.name=adamw, or "
                         "strategy.expert_parallel=1")  # fmt: skip
