"""`mode=verify`: the certificate of an algorithm, printed."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

import rft
from rft.algorithm import LOSSES, Gradient
from rft.modes.verify import certify, certify_dialogues
from rft.setup.assembly import Job

RECIPE = Path(rft.__file__).parent.parent / "recipes" / "own_loss"


def printed(config):
    """The verdict on the algorithm of a resolved config, and the printed text in one line."""
    console = Console(file=io.StringIO(), width=120)
    holds = certify(Job(config).algorithm, console)
    return holds, " ".join(console.file.getvalue().split())


@pytest.fixture
def mine(resolved, plugins_forgotten):
    """Prints the certificate of a run whose loss is a function of one's own."""

    def run(function, **facts):
        config = resolved()
        config["algorithm"]["loss"] = {"name": "mine"}
        LOSSES.register("mine", reads=("advantages",), **facts)(function)
        return printed(config)

    return run


def reinforce(logprobs, batch):
    return torch.where(batch["loss_mask"], -batch["advantages"] * logprobs, 0.0), {}


def test_an_algorithm_is_certified(resolved):
    holds, text = printed(resolved("algorithm=ppo", "+algorithm/terms=[kl]"))
    assert holds
    for part in ("advantage gae", "loss ppo_clip", "terms.kl kl", "critic_loss value", "aggregation token_mean"):
        assert f"✓ {part}: as declared" in text
    assert "FAILED" not in text and text.count("all 8 hold") == 3 and text.count("all 5 hold") == 2


def test_the_limit_of_advantages_is_said_not_to_be_examined(resolved):
    holds, text = printed(resolved("algorithm=rloo", "algorithm.advantage_clip=1.0"))
    assert holds and "not examined: algorithm.advantage_clip" in text
    assert "not examined" not in printed(resolved("algorithm=rloo"))[1]


def test_other_numbers_move_a_cosine_and_no_relation(resolved):
    holds, text = printed(resolved("algorithm=ppo", "algorithm.advantage.lam=0.5"))
    assert holds
    assert '✓ advantage gae: as declared, with these options Gradient("near", cosine=0.' in text


def test_a_loss_that_states_nothing_is_told_what_to_state(mine):
    holds, text = mine(reinforce)
    assert not holds
    assert (
        "✗ loss mine: declares no gradient; if the measured one is intended, register it with "
        'gradient=Gradient("exact")' in text
    )
    assert mine(reinforce, gradient=Gradient("exact"))[0]


def test_a_loss_that_states_what_it_is_not(mine):
    holds, text = mine(lambda logprobs, batch: (-reinforce(logprobs, batch)[0], {}), gradient=Gradient("exact"))
    assert not holds
    assert '✗ loss mine: is not what it declares; measured: gradient=Gradient("near", cosine=-1.000)' in text


def test_a_loss_that_depends_on_the_batch(mine):
    def divided(logprobs, batch):
        return reinforce(logprobs, batch)[0] / logprobs.numel(), {}

    holds, text = mine(divided, gradient=Gradient("scaled"))
    assert not holds
    assert "✗ loss mine: fails the check of padding, micro-batches" in text and "FAILED: padding, micro-batches" in text


def test_a_loss_that_is_reduced(mine):
    holds, text = mine(lambda logprobs, batch: (reinforce(logprobs, batch)[0].sum(), {}), gradient=Gradient("exact"))
    assert not holds
    assert "✗ loss mine: the loss and its statistics must have one value per unit" in text


def test_dialogues_are_certified_in_every_layout(resolved):
    console = Console(file=io.StringIO(), width=120)
    assert certify_dialogues(Job(resolved("algorithm=rloo")).algorithm, console)
    text = " ".join(console.file.getvalue().split())
    for layout in ("one row", "a row per turn", "fork", "compaction"):
        assert f"{layout} scaled " in text or f"{layout} exact " in text
    assert "if each row counted by itself near" in text and "✓ the gradient is the same for all rows" in text


def test_the_loss_of_the_recipe(resolved, monkeypatch, plugins_forgotten):
    monkeypatch.syspath_prepend(str(RECIPE))
    holds, text = printed(resolved(folder=RECIPE, name="run"))
    assert holds and "✓ loss leaky_clip: as declared" in text
