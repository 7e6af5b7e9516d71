"""Patterns that are refused before weights are loaded; what a frozen part holds, and how far a part moves."""

import re

import pytest
import torch

from rft.actor.init import load_model, read_config
from rft.actor.patterns import check_parts, freeze, lr_factors
from rft.distributed import start
from rft.setup.assembly import Job
from tests.actor.lora.lora_on_ranks import lora_options
from tests.helpers import MODEL, OPTIMIZER, actor_options, close, job
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
        check_parts(shape(), actor_options(head=head, frozen=patterns), {}, "actor")
    assert re.fullmatch(said, str(caught.value)), caught.value


def test_a_value_head_alone_may_train():
    check_parts(shape(), actor_options(head="value", frozen=["model.*"]), {}, "critic")


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


def test_the_first_pattern_that_matches_gives_the_factor():
    first, second, tied = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    named = [("a.first", first), ("b.second", second), ("embed", tied), ("head", tied)]
    assert lr_factors(named, {"head": 3.0, "*.first": 0.5, "a.*": 9.0, "embed": 7.0}) == {first: 0.5, tied: 3.0}


def test_a_part_moves_by_its_own_learning_rate():
    """AdamW without decay moves a weight in proportion to the learning rate, and the gradient of a step is the same."""
    plain = {"weight_decay": 0.0}
    factors = plain | {"lr_factors": {"model.layers.1.*": 0.25, "model.layers.*": 2.0}}
    for head in ("lm", "value"):
        made = job(head=head, updates=1)
        still = updates_on_ranks.perform(made | {"optimizer": OPTIMIZER | {"lr": 0.0}}, start("cpu"))["weights"]
        one, scaled = (
            updates_on_ranks.perform(made | {"optimizer": OPTIMIZER | more}, start("cpu"))["weights"]
            for more in (plain, factors)
        )
        expected = {}
        for name, weight in still.items():
            factor = 0.25 if ".layers.1." in f".{name}" else 2.0 if ".layers." in f".{name}" else 1.0
            expected[name] = weight + factor * (one[name] - weight)
        assert {*expected} == {*scaled} and any(".layers.1." in name for name in expected)
        close(scaled, expected)


def test_factors_of_adapters():
    both = actor_options(lora=lora_options())
    check_parts(shape(), both, {"actor.optimizer": {"*lora_B*": 16.0}}, "actor")  # LoRA+ (2402.12354)
    with pytest.raises(ValueError, match=r"^actor\.optimizer\.lr_factors='\*norm\*': matches none of the 28 "):
        check_parts(shape(), both, {"actor.optimizer": {"*norm*": 2.0}}, "actor")


def test_factors_are_refused_before_anything_is_loaded(tiny, monkeypatch):
    monkeypatch.setattr("rft.actor.model.load_with_head", None)
    for change, key in (
        ("actor.optimizer.lr_factors={model.visual.*: 0.1}", "actor.optimizer.lr_factors='model.visual.*'"),
        ("warmup.optimizer.lr_factors={x: 0.1}", "warmup.optimizer.lr_factors='x'"),
    ):
        with pytest.raises(ValueError, match=re.escape(key) + r": matches none of the \d+ parameters"):
            Job(tiny(change)).fit("")
    with pytest.raises(ValueError, match=r"lr_factors='model\.norm\.\*': matches none of the"):
        Job(tiny("actor.frozen=[model.norm.*]", "actor.optimizer.lr_factors={model.norm.*: 2}")).fit("")
    with pytest.raises(ValueError, match=r"actor\.optimizer\.lr_factors\.x=0: it must be above 0; frozen"):
        Job(tiny("actor.optimizer.lr_factors={x: 0}"))
