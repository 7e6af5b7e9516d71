"""Every plugin states what its gradient is, and the enumeration of a tiny policy proves it, to the last digits."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import rft
from rft.algorithm import ADVANTAGES, AGGREGATIONS, GRADIENT_MASKS, LOSSES, Gradient
from rft.algorithm.certificate import certificate
from rft.algorithm.certificate.measure import compare, expected_gradient, objective_gradient
from rft.algorithm.certificate.policy import Prompt, TinyPolicy
from rft.algorithm.certificate.sample import GROUP, KEEP, alone, call_loss, differentiated, prepared, sample_for

CONFIG = Path(rft.__file__).parent / "config" / "algorithm"
RUN = {  # what the yamls of plugins refer to
    "rollout": {"max_new_tokens": 16},
    "reward": {"accuracy": "right"},
    "algorithm": {"advantage": {"beta": 0.05}},
}
PLACES = {  # kind: its registry, and the folders of its yamls
    "advantage": (ADVANTAGES, ("advantage",)),
    "loss": (LOSSES, ("loss", "terms", "critic_loss", "prm_loss")),
    "gradient mask": (GRADIENT_MASKS, ("gradient_mask",)),
    "aggregation": (AGGREGATIONS, ("aggregation",)),
}


def read(path):
    node = OmegaConf.to_container(OmegaConf.merge(RUN, {"node": OmegaConf.load(path)}), resolve=True)["node"]
    node = next(iter(node.values())) if path.parent.name == "terms" else node
    return {name: option for name, option in node.items() if name != "coef"}


NODES = {
    f"{folder}/{path.stem}": (kind, registry, read(path))
    for kind, (registry, folders) in PLACES.items()
    for folder in folders
    for path in sorted((CONFIG / folder).glob("*.yaml"))
    if path.stem != "none"
}


def built(name):
    kind, registry, node = NODES[name]
    return registry.build(node, name), kind


@pytest.mark.parametrize("name", NODES)
def test_every_plugin_is_what_it_states(name):
    plugin, kind = built(name)
    assert isinstance(plugin.facts.gradient, Gradient), f"{name} states no gradient"
    found = certificate(plugin, kind)
    assert found.as_declared and found.same_cosine, (found.declared, found.measured)
    assert found.declared.relation != "near" or found.declared.cosine is not None, found.measured
    assert all(found.checks.values()), found.checks


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("advantage/gpg", {"scale": "group"}),
    ],
)
def test_the_gradient_of_an_option_is_what_the_plugin_states(name, options):
    kind, registry, node = NODES[name]
    found = certificate(registry.build({**node, **options}, name), kind)
    assert found.as_declared and found.same_cosine, (found.declared, found.measured)
    assert found.declared != registry.build(node, name).facts.gradient


def equivalent(gradient):
    return gradient is not None and (gradient.relation, gradient.target) == ("exact", "reward")


EQUIVALENT = [n for n, (kind, _, _) in NODES.items() if kind == "loss" and equivalent(built(n)[0].facts.gradient)]


@pytest.mark.parametrize("aggregation", [name for name, (kind, _, _) in NODES.items() if kind == "aggregation"])
def test_losses_are_one_on_policy(aggregation):
    weights = built(aggregation)[0](KEEP, GROUP, rows=KEEP.any(1), all_sum=alone).double()

    def gradient(plugin):
        rows = prepared(plugin, "loss", sample_for(plugin, "loss", on_policy=True))
        leaves, loss, _ = call_loss(plugin, rows)
        return rows, differentiated((weights * loss).sum(), leaves)["logprobs"]

    assert len(EQUIVALENT) >= 15
    for name in EQUIVALENT:
        plugin, _ = built(name)
        rows, found = gradient(plugin)
        expected = torch.where(KEEP, -weights * rows["batch", "advantages"], 0.0)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", [name for name, (kind, _, _) in NODES.items() if kind == "aggregation"])
def test_aggregations_differ_on_ragged_rows_alone(name):
    plugin, kind = built(name)

    def relation(**shape):
        policy = TinyPolicy([Prompt(positions=2, **shape)])
        found, wanted = expected_gradient(policy, plugin, kind), objective_gradient(policy, plugin, "reward")
        return compare(found, wanted, "reward", 1e-6).relation

    assert relation(ends=False) in ("exact", "scaled")
    assert (relation() == "near") == (plugin.name in ("token_mean", "seq_mean_token_mean", "group_mean"))
