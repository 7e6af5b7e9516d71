"""A small actor, a batch of eight rows, and one update of it: what the tests of actors share."""

import torch
from tensordict import TensorDict

from rft.algorithm.check import build_algorithm
from rft.algorithm.options import AlgorithmOptions
from rft.batch.collate import collate, dummy_row
from rft.metrics import Metrics
from rft.strategy.fsdp2 import FSDP2
from tests.helpers import make_actor, make_optimizer, make_strategy

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
OPTIMIZER = {
    "lr": 1e-3,
    "betas": [0.9, 0.95],
    "eps": 1e-5,  # a rounding error of the gradient is to stay one in the weights
    "weight_decay": 0.1,
    "max_grad_norm": 0.05,
    "schedule": "linear",
    "warmup_updates": 0,
    "final_lr": 0.0,
}
LENGTHS = [5, 9, 3, 12, 7, 4, 10, 6]
ALL = 10**6
TERMS = {"kl": {"name": "kl", "estimator": "k3", "coef": 0.1}, "entropy": {"name": "entropy", "coef": 0.02}}


def make(world, key="actor", head="lm", cap=ALL, seed=0, trains=True, reshard=True, kind=FSDP2, rows=None, **model):
    """An actor of MODEL with some options changed; `rows`: how rows lie in a forward (packing, share_prefix)."""
    optimizer = make_optimizer(**OPTIMIZER) if trains else None
    strategy = make_strategy(world, kind, reshard_after_forward=reshard)
    shape = {"head": head, "micro_batch_tokens": cap, "model_config": MODEL | model} | (rows or {})
    actor = make_actor(world, strategy, optimizer, key=key, seed=seed, **shape)
    if optimizer is not None:
        actor.begin_training(optimizer, updates=10)
    return actor


def make_method(loss=None, terms=None, aggregation="seq_mean_token_mean"):
    clip = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}
    return build_algorithm(
        AlgorithmOptions(
            name="test",
            group_size=2,
            source=None,
            advantage=None,
            loss=loss or clip,
            terms={} if terms is None else terms,
            aggregation={"name": aggregation},
            shaping={},
            reward_kl=None,
            critic_loss={"name": "value", "clip": 0.2},
            prm_loss=None,
            schedules={},
            critic_warmup=0,
            correction=None,
            gradient_mask=None,
            old_logprobs="actor",
            mask_truncated=False,
            mask_tied=False,
            pick="all",
            iteration=0,
            sampler="actor",
        ),
        "algorithm",
    )


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, 19, (length,), generator=generator)
        trains = torch.rand(length, generator=generator) < 0.7
        trains[0] = False
        trains[-1] = True
        columns = {
            name: torch.where(trains, torch.randn(length, generator=generator), 0.0)
            for name in ("advantages", "values", "returns")
        }
        columns |= {
            name: torch.where(trains, -3 + 0.3 * torch.randn(length, generator=generator), 0.0)
            for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
        }
        row = {
            "tokens": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            "response_mask": trains,
            "group": number // 2,
            "unit": number,
            "truncated": False,
        }
        rows.append(row | columns)
    batch = collate(rows)
    batch["keep"] = batch["response_mask"].clone()
    return batch


def update(actor, batch, algorithm, temperature=0.8, dummy=None, watch=(), compare=False):
    """One update; the numbers that it logged."""
    metrics = Metrics()
    rows = batch.clone()
    algorithm.compute_loss_weights(rows, actor.world.all_sum)
    objective = algorithm.policy if actor.key == "actor" else algorithm.learners["critic"]
    actor.update(
        rows, dummy_row(batch if dummy is None else dummy, rows), objective, temperature, metrics, watch, compare
    )
    return metrics.reduce(actor.world.gather)


def weights(actor):
    tensors = actor.network.state_dict().items()
    return {name: tensor.detach().clone() for name, tensor in actor.strategy.full_tensors(tensors)}


def same(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def wider(batch):
    """The batch as if it had a row longer than all of these."""
    pad = torch.nn.functional.pad
    columns = {name: pad(c, (0, 9)) if c.dim() > 1 else c for name, c in batch.exclude("tokens").items()}
    tokens = TensorDict({name: pad(c, (0, 9)) for name, c in batch["tokens"].items()}, batch_size=[len(batch)])
    return TensorDict(columns | {"tokens": tokens}, batch_size=[len(batch)])
