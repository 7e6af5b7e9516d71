"""Patterns that are refused before weights are loaded, and what a frozen part holds and does."""

import re

import pytest
import torch

from rft.actor.frozen import check_frozen, freeze
from rft.actor.init import load_model, read_config
from rft.distributed import start
from rft.setup.assembly import Job
from tests.helpers import MODEL, OPTIMIZER, close, job
from tests.strategy import updates_on_ranks


def shape(**changes):
    return read_config(None, MODEL | changes, 19, "actor")


def trained(patterns, **changes):
    model = load_model(None, shape(**changes), 0)
    freeze(model, patterns)
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}


def test_a_pattern_freezes_what_it_matches():
    everything = trained([])
    assert trained(["model.layers.1.*"]) == {name for name in everything if ".layers.1." not in name}
    assert trained(["*norm*", "lm_head.weight"]) == {
        name for name in everything - {"lm_head.weight"} if "norm" not in name
    }
    assert trained(["*.layers.[!1].mlp.*"]) == {name for name in everything if ".layers.0.mlp." not in name}


def test_a_tied_weight_goes_by_either_name():
    both = {"model.embed_tokens.weight", "lm_head.weight"}
    everything = trained([], tie_word_embeddings=True)
    for name in both:
        assert trained([name], tie_word_embeddings=True) == everything - both


@pytest.mark.parametrize(
    ("patterns", "head", "said"),
    [
        (
            ["*norm*", "model.embed_token.weight"],
            "lm",
            r"actor\.frozen\[1\]='model\.embed_token\.weight': matches none of the 25 parameters \(the first: "
            r"model\.embed_tokens\.weight, the last: lm_head\.weight\); did you mean model\.embed_tokens\.weight\?",
        ),
        (["visual"], "lm", r"actor\.frozen\[0\]='visual': matches none of the 25 parameters \([^;]*\)"),
        (["lm_head.*"], "value", r"actor\.frozen\[0\]='lm_head\.\*': matches none of the 24 .*"),
        (["model.*", "lm_head.*"], "lm", r"actor\.frozen=\['model\.\*', 'lm_head\.\*'\]: nothing is left to train; .*"),
        (["*"], "lm", r"actor\.frozen=\['\*'\]: nothing is left to train; take a pattern out"),
    ],
)
def test_what_is_refused(patterns, head, said):
    with pytest.raises(ValueError) as caught:
        check_frozen(shape(), head, patterns, "actor")
    assert re.fullmatch(said, str(caught.value)), caught.value


def test_a_value_head_alone_may_train():
    check_frozen(shape(), "value", ["model.*"], "critic")


PATTERNS = ["model.layers.0.*", "model.norm.weight", "*.q_proj.weight"]  # 11, 1 and 1 parameters


def test_the_rest_has_the_same_gradient():
    whole = updates_on_ranks.perform(job(), start("cpu"))
    partial = updates_on_ranks.perform(job(actor={"frozen": PATTERNS}), start("cpu"))
    gradient = dict(zip(whole["weights"], whole["gradient"].values(), strict=True))
    trains = [name for name in gradient if name in partial["state"]["optimizer"]["state"]]
    assert len(trains) == len(partial["gradient"]) == len(gradient) - 11 - 1 - 1
    close(dict(zip(trains, partial["gradient"].values(), strict=True)), {name: gradient[name] for name in trains})


@pytest.mark.parametrize("head", ["lm", "value"])
def test_what_is_frozen_stays_as_it_is_and_has_no_state(head):
    made = job(head=head, updates=3, actor={"frozen": PATTERNS})
    moved = updates_on_ranks.perform(made, start("cpu"))
    still = updates_on_ranks.perform(made | {"optimizer": OPTIMIZER | {"lr": 0.0}}, start("cpu"))["weights"]
    trains = moved["state"]["optimizer"]["state"].keys()
    assert len(trains) == len(still) - 11 - 1 - 1
    assert {name for name in still if not torch.equal(still[name], moved["weights"][name])} == trains


def test_it_is_refused_before_anything_is_loaded(tiny, monkeypatch):
    monkeypatch.setattr("rft.actor.model.load_with_head", None)
    with pytest.raises(ValueError, match=r"^actor\.frozen\[0\]='model\.embed': matches none of the "):
        Job(tiny("actor.frozen=[model.embed]")).fit("")
    with pytest.raises(ValueError, match=r"^critic\.frozen\[0\]='lm_head\.weight': matches none of the "):
        Job(tiny("algorithm=ppo", "critic.frozen=[lm_head.weight]")).fit("")
    with pytest.raises(
        ValueError, match=r"^reference\.frozen=\['x'\]: the reference never trains; set reference\.frozen=\[\]$"
    ):
        Job(tiny("reference.frozen=[x]"))
    with pytest.raises(
        ValueError, match=r"^actor\.frozen=\['\*norm\*'\]: with actor\.lora no weight of the model itself"
    ):
        Job(tiny("actor/lora=lora", "actor.frozen=[*norm*]"))
