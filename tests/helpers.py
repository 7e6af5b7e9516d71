"""Parts of a run with the options of their yaml, so that a test states only the options that it is about."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import rft
from rft.actor.actor import Actor
from rft.actor.lora.adapters import Lora
from rft.actor.optim.optimizer import Optimizer
from rft.data.encode.tokenizer import characters
from rft.distributed import World
from rft.registry import take
from rft.rollout.engine.base import EngineContext
from rft.rollout.engine.hf import HFEngine
from rft.strategy.fsdp2 import FSDP2

CONFIG = Path(rft.__file__).parent / "config"


def yaml_options(file: str, **changes: Any) -> dict[str, Any]:
    """The keys of an option file with some values changed; groups that it includes are left out."""
    node = OmegaConf.merge(OmegaConf.load(CONFIG / file), changes)
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key not in ("defaults", "_target_")}


def make_strategy(world: World, kind: type[FSDP2] = FSDP2, **changes: Any) -> FSDP2:
    """The default strategy, on the CPU."""
    options = yaml_options("strategy/fsdp2.yaml", device="cpu", **changes)
    return kind(world=world, **take(options, FSDP2, "strategy", "FSDP2", ("world",)))


def make_optimizer(**changes: Any) -> Optimizer:
    """The optimizer of actor=hf."""
    return Optimizer(**{**yaml_options("actor/hf.yaml", path=None)["optimizer"], **changes})


def make_actor(
    world: World,
    strategy: FSDP2,
    optimizer: Optimizer | None = None,
    *,
    key: str = "actor",
    seed: int = 0,
    **changes: Any,
) -> Actor:
    """An actor with the options of actor=hf and a vocabulary of 19 characters; frozen where it has no optimizer."""
    options = {**yaml_options("actor/hf.yaml", path=None), "lora": None, **changes}
    del options["optimizer"]
    supplied = {"key": key, "world": world, "strategy": strategy, "seed": seed, "optimizer": optimizer}
    supplied["tokenizer"] = characters(alphabet="0123456789abcdef")
    return Actor(**supplied, **take(options, Actor, key, "Actor", tuple(supplied)))


def engine_context(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path = Path("/nowhere"),
    world: Any = None,
    lora: Lora | None = None,
    **engine_args: Any,
) -> EngineContext:
    """What a run gives to an engine; without a world, for engines that need none."""
    return EngineContext(world, model, tokenizer, folder, engine_args, lora)


def hf_engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_rows: int) -> HFEngine:
    """The engine of rollout=hf."""
    return HFEngine(engine_context(model, tokenizer), max_rows)
