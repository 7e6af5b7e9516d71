"""Adapters that vLLM applies beside the weights of a model, so that a new version needs the adapters alone.

Left out: `sleep_level=2`, which drops the weights, and layers for which vLLM has no adapters; both are refused.
"""

import shutil
from pathlib import Path
from typing import Any

from rft.actor.lora.base import Lora, LoraWeights
from rft.distributed import World

KEYS = frozenset(("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras"))  # follow from the one adapter
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM allocates for
MERGE = "set rollout.engine.merge_lora=true"


def check_adapters(lora: Lora | None, sleep_level: int | None, media: bool) -> None:
    """Checks that vLLM can apply the adapters.

    Args:
        lora: of the policy.
        sleep_level: of the engine.
        media: whether the policy has a processor.

    Raises:
        ValueError: names the key and the cure.
    """
    if lora is None:
        raise ValueError(
            "rollout.engine.merge_lora=false: the policy has no adapters; set actor/lora=lora, or "
            "rollout.engine.merge_lora=true"
        )
    if lora.rank > RANKS[-1]:
        raise ValueError(
            f"actor.lora.rank={lora.rank}: vLLM applies adapters of a rank up to {RANKS[-1]}; lower it, or {MERGE}"
        )
    if media:
        raise ValueError(
            f"rollout.engine.merge_lora=false: adapters beside the weights are for models of text alone; {MERGE}"
        )
    if sleep_level == 2:
        raise ValueError(
            "rollout.engine.sleep_level=2: the engine would drop the weights beside the adapters, which it takes "
            f"once; set it to null, or {MERGE}"
        )


def room(lora: Lora) -> dict[str, Any]:
    """The arguments of vLLM for one adapter."""
    return {"enable_lora": True, "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank)}


def refused(error: ValueError) -> ValueError:
    """vLLM's error about adapters, with key and cure."""
    message = str(error).rstrip(".")
    return ValueError(
        f"rollout.engine.merge_lora=false: vLLM says: {message}; choose other actor.lora.targets, or {MERGE}"
    )


def replace_adapter(engine: Any, weights: LoraWeights, before: Any, world: World, folder: Path) -> Any:
    """Loads the adapters of a model into an engine, through a temporary file. A collective.

    Args:
        engine: of vLLM, in this process.
        before: what the last call returned, or None. The engine replaces that adapter.
        folder: of the file; all ranks can read it.

    Returns:
        The adapter as requests name it.

    Raises:
        ValueError: vLLM does not support the adapters.
    """
    from vllm.lora.request import LoRARequest

    number = 1 if before is None else before.lora_int_id + 1  # vLLM does not read an adapter of a known number
    tensors = {name: tensor.cpu() for name, tensor in weights.alone() if world.rank == 0}
    world.decide(lambda: weights.adapters.save(tensors, folder))
    request = LoRARequest(str(number), number, str(folder))
    try:
        engine.add_lora(request)
    except ValueError as error:
        raise refused(error) from error
    world.gather(None)  # every rank has read it
    world.decide(lambda: shutil.rmtree(folder))
    return request
