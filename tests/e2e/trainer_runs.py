"""Runs of the trainer, as tests interrupt and compare them."""

import json

import torch

from rft.train.trainer import Trainer

# What a second run cannot repeat.
CLOCK = ("time/", "throughput/", "memory/")
ADAPTIVE = ("algorithm/reward_kl=kl_adaptive", "algorithm.reward_kl.coef.horizon=50", "algorithm/terms=[kl_adaptive]",
            "algorithm.terms.kl.coef.horizon=50")  # fmt: skip


def numbers(run):
    """Rows of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows]


def state(run):
    return torch.load(run / "checkpoints" / "latest" / "state.pt", weights_only=False)


def same(one, other):
    """Equal to the last bit, tensors included."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def worst(run):
    """The lines of the worst tokens; none where nothing was sampled."""
    path = run / "worst_tokens.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Interrupted(Exception):
    pass


def interrupt(monkeypatch, step, part="update"):
    """Lets the run fail in the middle of a step."""
    whole = getattr(Trainer, part)

    def failing(trainer, *arguments):
        if trainer.step == step:
            raise Interrupted
        return whole(trainer, *arguments)

    monkeypatch.setattr(Trainer, part, failing)
