"""What updates_on_ranks.py is asked to do: a small model, a batch of eight rows, and where the rows are."""

import torch

from rft.algorithm.check import build_algorithm
from rft.algorithm.options import AlgorithmOptions
from rft.batch.collate import collate, dummy_row
from rft.metrics import Metrics

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
OPTIMIZER = {
    "lr": 1e-3,
    "betas": [0.9, 0.95],
    "eps": 1e-5,
    "weight_decay": 0.1,
    "max_grad_norm": 0.05,
    "schedule": "constant",
    "warmup_updates": 0,
    "final_lr": 0.0,
}
CLIP = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}
METHOD = {
    "name": "test",
    "group_size": 2,
    "source": None,
    "advantage": None,
    "loss": CLIP,
    "terms": {"kl": {"name": "kl", "estimator": "k3", "coef": 0.1}, "entropy": {"name": "entropy", "coef": 0.02}},
    "aggregation": {"name": "seq_mean_token_mean"},
    "shaping": {},
    "reward_kl": None,
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
EVEN = [[0, 2, 4, 6], [1, 3, 5, 7]]
UNEVEN = [[3], [7, 6, 5, 4, 2, 1, 0]]
ALL_ON_ONE = [[0, 1, 2, 3, 4, 5, 6, 7], []]


def make_batch(prompt=0):
    """Eight rows; the two of a group begin with as many equal tokens as `prompt` says."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, 19, (length,), generator=generator)
        ids[:prompt] = 3 + number // 2
        trains = torch.rand(length, generator=generator) < 0.7
        trains[0], trains[-1] = False, True
        noise = {
            name: torch.where(trains, mean + torch.randn(length, generator=generator), 0.0)
            for name, mean in {
                "advantages": 0,
                "values": 0,
                "returns": 0,
                "old_logprobs": -3,
                "ref_logprobs": -3,
            }.items()
        }
        row = {
            "tokens": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            "response_mask": trains,
            "group": number // 2,
            "unit": number,
            "truncated": False,
        }
        rows.append(row | noise)
    batch = collate(rows)
    batch["keep"] = batch["response_mask"].clone()
    batch["rollout_logprobs"] = batch["old_logprobs"] + 0.1
    return batch


def make_taught():
    """The batch with what a teacher says of it: of four tokens in each place, out of five."""
    batch, generator = make_batch(), torch.Generator().manual_seed(1)
    shape = batch["keep"].shape
    batch["teacher_top_ids"] = torch.rand(*shape, 19, generator=generator).argsort(-1)[..., :4].int()
    batch["teacher_top_logprobs"] = torch.randn(*shape, 5, generator=generator).log_softmax(-1)[..., :4]
    return batch


def update(actor, rows):
    """One update of an actor of one process; the numbers that it logged."""
    algorithm, metrics, rows = build_algorithm(AlgorithmOptions(**METHOD), "algorithm"), Metrics(), rows.clone()
    algorithm.compute_loss_weights(rows, actor.world.all_sum)
    objective = algorithm.policy if actor.key == "actor" else algorithm.learners["critic"]
    actor.update(rows, dummy_row(rows, rows), objective, 0.8, metrics)
    return metrics.reduce(actor.world.gather)


def job(shares=EVEN, **changes):
    """Everything that `perform` is told; `strategy` and `actor` hold the options that differ from their yaml."""
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


def close(found, expected, tolerance=1e-5):
    """Relative to the largest number of a tensor: what a sum of float32 can keep."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        gap = (found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12)
        assert gap <= tolerance, f"{name}: {gap}"
