"""Every value of a config reaches an object of the run, or the run refuses it: nothing is accepted and ignored."""

import copy
import functools
import hashlib
import random
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from rft.logger.log import SilentLog
from rft.setup.assembly import Job
from rft.setup.components import Components
from rft.setup.typed import leaves
from rft.setup.unread import MODE_NODES, unread_keys
from rft.strategy.gather import to_local

RUNS = {
    "grpo": [],
    "ppo": ["algorithm=ppo"],
    "dapo": ["algorithm=dapo"],
    "kl and correction": [
        "algorithm=grpo",
        "algorithm/terms=[kl]",
        "algorithm/correction=token_tis",
        "algorithm/reward_kl=kl",
    ],
    "on-policy distillation": ["algorithm=on_policy_distill"],
    "sft": ["algorithm=sft"],
    "dpo": ["algorithm=dpo", "warmup=none"],
    "online dpo": ["algorithm=online_dpo"],
    "reward model": ["algorithm=reward_model"],
    "lora, cosine, samples": ["actor/lora=lora", "actor.optimizer.schedule=cosine", "eval.samples=4"],
}
LIKE_GRPO = ("ppo", "dapo", "kl and correction", "online dpo", "lora, cosine, samples")  # their other nodes are grpo's
MODELS = ("actor", "critic", "prm", "reference", "teacher")
# Keys that no object of a run shows, each with the reason.
ELSEWHERE = {
    "mode": "decides which mode runs, before there are objects",
    "name": "part of the default of output_dir",
    "output_dir": "the folder that is made when the run starts",
    "resume": "decides about the folder when the run starts",
    "plugins": "modules that are imported",
    "depends_on": "checked when the run starts",
    "cache": "a folder on disk: token counts are equal with and without it",
    "strategy.cudnn_attention": "set in torch when the processes start; see tests/test_distributed.py",
    "strategy.deterministic": "set in torch when the processes start; see tests/test_distributed.py",
    "algorithm.name": "part of the default of name",
    "data.name": "part of the default of name",
    **{f"{key}.trust_remote_code": "read where a folder has code of its own; see test_own_code.py" for key in MODELS},
}


def changed(value: Any) -> Iterator[Any]:
    """Other values of the type of a leaf; for null any type."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value * 2, value + 1, value + 3)
    elif isinstance(value, float):
        yield from (value / 2 + 0.01, value + 0.25, value * 0.9)
    elif isinstance(value, str):
        yield value + "x"
    elif isinstance(value, list):
        yield from ([*value[:-1], *map(functools.partial(next_to), value[-1:])], [*value, *value[-1:]], [1], ["x"])
    elif value is None:
        yield from (1, 0.5, "x", True)
    elif isinstance(value, dict):
        yield {"x": 1}


def next_to(value: Any) -> Any:
    """The first of the other values."""
    return next(changed(value))


def at(config: dict, key: str) -> tuple[dict, str]:
    """The node that holds a leaf, and the leaf's name in it."""
    *above, name = key.split(".")
    for part in above:
        config = config[part]
    return config, name


def fingerprint(*roots: Any) -> str:
    """A digest of everything that objects hold: numbers, texts, tensors, and the functions that they call."""
    digest, seen = hashlib.sha256(), {}
    rest = list(roots)
    while rest:
        thing = rest.pop()
        if isinstance(thing, str | bytes | int | float | bool | None | type):
            digest.update(f"{type(thing).__name__} {thing!r};".encode())
            continue
        if id(thing) in seen:
            digest.update(b"again;")
            continue
        seen[id(thing)] = thing
        digest.update(f"{type(thing).__qualname__};".encode())
        if isinstance(thing, torch.Tensor):
            thing = to_local(thing)
            if not thing.is_meta:
                digest.update(thing.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())
            rest.append(str((thing.dtype, tuple(thing.shape), thing.requires_grad)))
        elif isinstance(thing, dict):
            rest += [part for pair in thing.items() for part in pair]
        elif isinstance(thing, list | tuple | set | frozenset):
            rest += sorted(thing, key=repr) if isinstance(thing, set | frozenset) else list(thing)
        elif isinstance(thing, functools.partial):
            rest += [thing.func, thing.args, thing.keywords]
        elif isinstance(thing, types.MethodType):
            rest += [thing.__self__, thing.__func__]
        elif isinstance(thing, types.FunctionType) and thing.__module__.startswith("rft."):
            rest += [thing.__qualname__, *(cell.cell_contents for cell in thing.__closure__ or ())]
        elif isinstance(thing, Path):
            rest.append(str(thing))
        elif isinstance(thing, nn.Module):
            rest += [part for pair in (*thing.named_parameters(), *thing.named_buffers()) for part in pair]
            rest += [plain(vars(module)) for module in thing.modules()]
        elif isinstance(thing, torch.optim.Optimizer):
            rest.append([plain(group) for group in thing.param_groups])
        elif isinstance(thing, PretrainedConfig):
            rest.append(thing.to_dict())
        elif type(thing).__module__.startswith("rft."):
            rest.append(getattr(thing, "__dict__", {}))
    return digest.hexdigest()


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Those values that are numbers, texts, configs, or dictionaries of numbers; not torch's own, such as hooks."""
    kinds = str | bool | int | float | PretrainedConfig
    return {
        name: value
        for name, value in values.items()
        if not name.startswith("_")
        and (
            isinstance(value, kinds) or (isinstance(value, dict) and all(isinstance(v, kinds) for v in value.values()))
        )
    }


def objects(config: dict, folder: Path) -> str:
    """The digest of what a run is made of."""
    torch.manual_seed(0)
    random.seed(0)
    job = Job(config)
    world = job.join()
    loaded = job.prepare(world)
    trainer, stages = job.assemble(world, loaded, folder, SilentLog())
    trainer.sampler.close()
    trainer.checkpoints.close()  # it holds a file descriptor, whose number would differ
    return fingerprint(trainer, stages, loaded, job.sinks)


def not_read(config: dict) -> dict[str, str]:
    """The keys that the run refuses where they are typed."""
    return unread_keys(Components(config, typed={}))


def reaches(config: dict, key: str, before: str, folder: Path) -> bool:
    """Whether another value of a leaf changes the objects, or is refused with its key."""
    node, name = at(config, key)
    for value in changed(node[name]):
        other = copy.deepcopy(config)
        node, name = at(other, key)
        node[name] = value
        try:
            if objects(other, folder) != before:
                return True
        except (ValueError, OSError) as error:
            if key.split(".")[-1] in str(error) or str(value) in str(error):
                return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_every_leaf(run, tiny, tmp_path):
    config, grpo = (tiny(*RUNS[name], "data.train.count=24", "data.eval.heldout.count=8") for name in (run, "grpo"))
    before, unread = objects(config, tmp_path), not_read(config)
    assert objects(config, tmp_path) == before, "the digest is that of the config alone"
    ignored, known = [], {*unread, *ELSEWHERE, *MODE_NODES}
    if run in LIKE_GRPO:
        known |= {name for name, node in config.items() if node == grpo[name]} - {*not_read(grpo)}
    for key in leaves(config, ""):
        above = [".".join(key.split(".")[:count]) for count in range(1, key.count(".") + 2)]
        if known.isdisjoint(above) and not reaches(config, key, before, tmp_path):
            ignored.append(key)
    assert ignored == []
