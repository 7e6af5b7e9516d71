"""What tests share: parts of a run with the options of their yaml, small batches, an actor and its updates, runs."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import rft
from rft.actor.actor import Actor
from rft.actor.base import ModelContext
from rft.actor.lora.base import Lora
from rft.actor.optim.optimizer import Optimizer
from rft.actor.options import ActorOptions
from rft.algorithm.algorithm import Algorithm
from rft.algorithm.check import build_algorithm
from rft.algorithm.objective import Update
from rft.algorithm.options import AlgorithmOptions
from rft.batch.collate import collate, dummy_row
from rft.data.encode.tokenizer import characters
from rft.distributed import World
from rft.metrics import Metrics
from rft.registry import take
from rft.rollout.engine.base import EngineContext
from rft.rollout.engine.hf import HFEngine
from rft.strategy.base import Strategy
from rft.strategy.fsdp2 import FSDP2
from rft.strategy.fsdp2_options import FSDP2Options
from rft.train.trainer import Trainer

CONFIG = Path(rft.__file__).parent / "config"
HF = ("actor/_base.yaml", "actor/hf.yaml")
merge_yaml = cache(lambda files, new: OmegaConf.merge(*(OmegaConf.load(CONFIG / f) for f in files), json.loads(new)))
F64 = torch.float64
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 20,  # the vocabulary of 19 does not divide over two ranks
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
SMALL = {key: value for key, value in MODEL.items() if key != "head_dim"} | {"hidden_size": 16}
SIZES = {  # of models of several kinds, whose logits are compared with those of transformers
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.4,
}
ALPHABET = "0123456789abcdef"  # with three special tokens the vocabulary of 19
OPTIMIZER = {
    "lr": 1e-3,
    "betas": [0.9, 0.95],
    "eps": 1e-5,  # a rounding error of the gradient is to stay one in the weights
    "weight_decay": 0.1,
    "max_grad_norm": 0.05,
    "schedule": "constant",
    "warmup_updates": 0,
    "final_lr": 0.0,
}
CLIP = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}
TERMS = {"kl": {"name": "kl", "estimator": "k3", "coef": 0.1}, "entropy": {"name": "entropy", "coef": 0.02}}
METHOD = {
    "name": "test",
    "group_size": 2,
    "source": None,
    "advantage": None,
    "advantage_clip": None,
    "loss": CLIP,
    "terms": TERMS,
    "aggregation": {"name": "seq_mean_token_mean"},
    "shaping": {},
    "reward_kl": None,
    "turn_rewards": None,
    "critic_loss": {"name": "value", "clip": None},
    "prm_loss": None,
    "schedules": {},
    "critic_warmup": 0,
    "correction": None,
    "gradient_mask": None,
    "old_logprobs": "actor",
    "mask_truncated": False,
    "mask_tied": False,
    "pick": "all",
    "iteration": 0,
    "sampler": "actor",
}
DISTILL = METHOD | {"loss": {"name": "jsd", "beta": 0.3}}
NLL = METHOD | {"loss": {"name": "nll"}, "terms": {}, "aggregation": {"name": "token_mean"}}
LENGTHS = [5, 9, 3, 12, 7, 4, 10, 6]
ALL = 10**6  # tokens of a micro-batch: every row in one forward
LAYOUTS = {  # how rows lie in a forward
    "packed": {"packing": True, "share_prefix": False},
    "shared": {"packing": True, "share_prefix": True},
    "padded": {"packing": False, "share_prefix": False},
}
# Which rows each of two ranks has.
EVEN = [[0, 2, 4, 6], [1, 3, 5, 7]]
UNEVEN = [[3], [7, 6, 5, 4, 2, 1, 0]]
ALL_ON_ONE = [[0, 1, 2, 3, 4, 5, 6, 7], []]
# Metrics that a second run cannot repeat.
CLOCK = ("time/", "throughput/", "memory/", "episode/environment_s")
ADAPTIVE = ("algorithm/reward_kl=kl_adaptive", "algorithm.reward_kl.coef.horizon=50", "algorithm/terms=[kl_adaptive]",
            "algorithm.terms.kl.coef.horizon=50")  # fmt: skip


def yaml_options(*files: str, **changes: Any) -> dict[str, Any]:
    """The keys of option files, each on top of the one before, with some values changed; without their groups."""
    plain: Any = OmegaConf.to_container(merge_yaml(files, json.dumps(changes)), resolve=True)
    return {str(key): value for key, value in plain.items() if key not in ("defaults", "_target_")}


def file_rows(path: Path) -> dict[str, Any]:
    """The node of the rows of a file."""
    return {"_target_": "rft.data.rows.sources.FileRows", **yaml_options("data/rows/file.yaml", path=str(path))}


def strategy_options(**changes: Any) -> FSDP2Options:
    """The options of the default strategy."""
    return FSDP2Options(**take(yaml_options("strategy/fsdp2.yaml", **changes), FSDP2Options, "strategy", "FSDP2"))


def make_strategy(world: World, kind: type[FSDP2] = FSDP2, **changes: Any) -> FSDP2:
    """The default strategy, on the CPU."""
    return kind(strategy_options(device="cpu", **changes), world)


def make_optimizer(**changes: Any) -> Optimizer:
    """The optimizer of actor=hf."""
    return Optimizer(**{**yaml_options(*HF, path=None)["optimizer"], **changes})


def actor_options(optimizer: Optimizer | None = None, key: str = "actor", **changes: Any) -> ActorOptions:
    """The options of actor=hf without adapters, changed; `key` is the model's in messages."""
    given = take({**yaml_options(*HF, path=None, lora=None), "optimizer": None, **changes}, ActorOptions, key, "Actor")
    return replace(ActorOptions(**given), optimizer=optimizer)


def make_actor(
    world: World,
    strategy: Strategy,
    optimizer: Optimizer | None = None,
    *,
    key: str = "actor",
    seed: int = 0,
    **changes: Any,
) -> Actor:
    """An actor with the options of actor=hf and a vocabulary of 19 characters; frozen where it has no optimizer."""
    context = ModelContext(key, world, strategy, characters(alphabet=ALPHABET), seed)
    return Actor(context, actor_options(optimizer, key, **changes))


def engine_context(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path = Path("/nowhere"),
    world: Any = None,
    lora: Lora | None = None,
    computes: torch.dtype | None = None,
    **engine_args: Any,
) -> EngineContext:
    """What a run gives to an engine; without a world, for engines that need none. `computes`: as the trainer does."""
    return EngineContext(world, model, tokenizer, folder, engine_args, lora, computes or model.dtype)


def hf_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_rows: int, cuda_graphs: bool = False
) -> HFEngine:
    """The engine of rollout=hf, with the weights of the model. On a CPU its graphs are the plain static steps."""
    options = HFEngine.Options(max_rows=max_rows, dtype=None, cuda_graphs=cuda_graphs)
    engine = HFEngine(options, engine_context(copy.deepcopy(model), tokenizer))  # without weights
    engine.update_weights(0, model.state_dict().items())
    return engine


def batch_of(keep: Any, group: Any = None, **columns: Any) -> TensorDict:
    """Columns as functions of the math read them.

    Args:
        keep: the tokens that train (B, T).
        group: of each row; None: all rows are of one group.
        columns: lists of numbers become float64; tensors stay as they are. Each row is a unit unless it is stated.
    """
    keep = torch.as_tensor(keep).bool()
    group = torch.zeros(len(keep), dtype=torch.int64) if group is None else torch.as_tensor(group)
    columns = {"unit": torch.arange(len(keep)) * 5, **columns}  # no unit is the number of its row
    for name, column in columns.items():
        if not isinstance(column, Tensor | TensorDict):
            columns[name] = torch.tensor(column, dtype=F64)
    return TensorDict({"loss_mask": keep, "group": group, **columns}, batch_size=[len(keep)])


def token_batch(*rows: Any, **columns: Sequence[Any]) -> TensorDict:
    """A collated batch of these token ids, a row each; `columns` holds a value for every row.

    All tokens train unless `response_mask` is stated, each row is a group and a unit unless it is stated, and `tokens`
    may hold more columns of tokens.
    """
    made = []
    for number, row in enumerate(rows):
        ids = torch.as_tensor(row)
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        facts = {"response_mask": torch.ones(len(ids), dtype=torch.bool), "group": number, "unit": number}
        facts |= {name: column[number] for name, column in columns.items()}
        made.append(facts | {"tokens": tokens | facts.get("tokens", {})})
    return collate(made)


def make_batch(seed: int = 0, prompt: int = 0, spread: float = 1.0) -> TensorDict:
    """Eight rows with all columns of losses; the two of a group begin with `prompt` equal tokens.

    The log-probabilities lie around -3 with a standard deviation of `spread`.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[Tensor] = []
    columns: dict[str, list[Any]] = {"response_mask": [], "group": [], "truncated": [False] * len(LENGTHS)}
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, 19, (length,), generator=generator)
        ids[:prompt] = 3 + number // 2
        trains = torch.rand(length, generator=generator) < 0.7
        trains[0], trains[-1] = False, True
        rows.append(ids)
        columns["response_mask"].append(trains)
        columns["group"].append(number // 2)
        for name in ("advantages", "values", "returns", "old_logprobs", "ref_logprobs"):
            noise = torch.randn(length, generator=generator)
            value = -3 + spread * noise if name.endswith("logprobs") else noise
            columns.setdefault(name, []).append(torch.where(trains, value, 0.0))
    batch = token_batch(*rows, **columns)
    batch["loss_mask"] = batch["response_mask"].clone()
    batch["rollout_logprobs"] = batch["old_logprobs"] + 0.1
    return batch


def wider(batch: TensorDict) -> TensorDict:
    """The batch as if it had a row longer than all of these."""
    pad = torch.nn.functional.pad
    columns = {name: pad(c, (0, 9)) if c.dim() > 1 else c for name, c in batch.exclude("tokens").items()}
    tokens = TensorDict({name: pad(c, (0, 9)) for name, c in batch["tokens"].items()}, batch_size=[len(batch)])
    return TensorDict(columns | {"tokens": tokens}, batch_size=[len(batch)])


def small_actor(
    world: World,
    key: str = "actor",
    head: str = "lm",
    cap: int = ALL,
    seed: int = 0,
    trains: bool = True,
    reshard: bool = True,
    kind: type[FSDP2] = FSDP2,
    rows: dict[str, Any] | None = None,
    **model: Any,
) -> Actor:
    """An actor of MODEL with some options changed; `rows`: how rows lie in a forward (packing, share_prefix)."""
    optimizer = make_optimizer(**OPTIMIZER | {"schedule": "linear"}) if trains else None
    strategy = make_strategy(world, kind, reshard_after_forward=reshard)
    shape = {"head": head, "micro_batch_tokens": cap, "model_config": MODEL | model} | (rows or {})
    actor = make_actor(world, strategy, optimizer, key=key, seed=seed, **shape)
    if optimizer is not None:
        actor.begin_training(optimizer, updates=10)
    return actor


def make_algorithm(
    loss: dict[str, Any] = CLIP, terms: dict[str, Any] | None = None, aggregation: str = "seq_mean_token_mean"
) -> Algorithm:
    """METHOD with another loss, other terms (none) and a clipped value loss."""
    changes = {"loss": loss, "terms": terms or {}, "aggregation": {"name": aggregation}}
    critic = {"critic_loss": {"name": "value", "clip": 0.2}}
    return build_algorithm(AlgorithmOptions(**METHOD | changes | critic), "algorithm")


def plain_algorithm(term_weights: dict[str, float] | None = None, **changes: Any) -> Algorithm:
    """A clipped loss of Dr.GRPO's advantage, token mean, nothing beside it, and some options changed."""
    plain = {"terms": {}, "critic_loss": None, "advantage": {"name": "dr_grpo"}, "aggregation": {"name": "token_mean"}}
    return build_algorithm(AlgorithmOptions(**METHOD | plain | changes), "algorithm", term_weights)


def update(
    actor: Actor,
    batch: TensorDict,
    algorithm: Algorithm | None = None,
    temperature: float = 0.8,
    dummy: TensorDict | None = None,
    watch: tuple[str, ...] = (),
    log_mismatch: bool = False,
) -> dict[str, float]:
    """One update, with METHOD unless another algorithm is given; the numbers that it logged."""
    algorithm = algorithm or build_algorithm(AlgorithmOptions(**METHOD), "algorithm")
    metrics, rows = Metrics(), batch.clone()
    algorithm.compute_loss_weights(rows, actor.world.all_sum)
    objective = algorithm.policy if actor.key == "actor" else algorithm.learners["critic"]
    dummy = dummy_row(batch if dummy is None else dummy, rows)
    actor.update(rows, dummy, Update(objective, watch, log_mismatch), temperature, metrics)
    return metrics.reduce(actor.world.gather)


def weights(actor: Actor) -> dict[str, Tensor]:
    return {name: full.clone() for name, full in actor.strategy.full_tensors(actor.network.state_dict().items())}


def job(shares: list[list[int]] = EVEN, **changes: Any) -> dict[str, Any]:
    """A job of updates_on_ranks.py; `strategy` and `actor` hold the options that differ from their yaml."""
    plain = {
        "algorithm": METHOD,
        "model": MODEL,
        "optimizer": OPTIMIZER,
        "head": "lm",
        "strategy": {},
        "actor": {},
        "cap": 20,
        "updates": 1,
        "batch": make_batch(),
        "shares": {1: [list(range(8))], 2: shares},
        "state": None,
    }
    return plain | changes


def same(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Relative to the largest number of a tensor: what a sum of float32 can keep."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        gap = (found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12)
        assert gap <= tolerance, f"{name}: {gap}"


def identical(one: Any, other: Any) -> bool:
    """Equal to the last bit, tensors included."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(identical(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return one == other


def numbers(run: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows]


def worst(run: Path) -> list[dict[str, Any]]:
    """The lines of the worst tokens; none where nothing was sampled."""
    path = run / "worst_tokens.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Interrupted(Exception):
    pass


def interrupt(monkeypatch: Any, step: int, part: str = "update") -> None:
    """Lets the run fail in the middle of a step."""
    whole = getattr(Trainer, part)

    def failing(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.step == step:
            raise Interrupted
        return whole(trainer, *arguments)

    monkeypatch.setattr(Trainer, part, failing)
