"""Ranks that share the experts of every layer do what one process does, with some of the experts each."""

import pytest

from tests.helpers import METHOD, MODEL, OPTIMIZER, TERMS, close, job
from tests.strategy.test_tensor_parallel_grid import EXPERTS

TOGETHER = {"expert_parallel": 2}
BALANCED = METHOD | {"terms": TERMS | {"router_balance": {"name": "router_balance", "coef": 0.3}}}
SHARED = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 12}
SHARES = [[3], [7, 6], [5, 4, 2, 1, 0], []]


def given(strategy=None, **changes):
    plain = job(strategy=TOGETHER | (strategy or {}), **{"updates": 2, "model": EXPERTS} | changes)
    return plain | {"shares": {1: plain["shares"][1], 4: SHARES}}


JOBS = {
    "two groups": given(algorithm=BALANCED),
    "one group": given({"expert_parallel": 4}),
    "two replicas, recomputed": given({"replicas": 2, "activation_checkpointing": "full"}),
    "sequences are split too": given({"context_parallel": 2}, algorithm=BALANCED),
    "whole and kept": given({"accumulate": "whole", "reshard_after_forward": False}),
    "mixtral, recomputed, selective": given(
        {"activation_checkpointing": "selective"}, model=EXPERTS | {"model_type": "mixtral", "num_local_experts": 4}
    ),
    "qwen2_moe, a shared expert, a frozen block": given(
        model=EXPERTS | SHARED, actor={"frozen": ["model.layers.0.*"]}
    ),
}
