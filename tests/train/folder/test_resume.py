"""Which keys of a config may differ between a run and the command that continues it."""

import copy

import pytest
from omegaconf import OmegaConf

from rft.train.folder.resume import (
    CHANGES_NOTHING,
    NEEDED_KEYS,
    NEEDED_VALUES,
    STEPS,
    below,
    changed_keys,
    describe_changes,
    overrides,
    unloadable_keys,
)
from tests.helpers import CONFIG

pytestmark = pytest.mark.slow

# One key of each node that changes the weights, or that tells what is measured.
COMPARED = ("seed", "steps", "epochs", "plugins", "metric", "batch.prompts", "batch.minibatches", "eval.samples",
            "warmup.steps", "algorithm.group_size", "algorithm.loss.clip_high", "actor.path", "actor.packing",
            "actor.optimizer.lr", "rollout.temperature", "rollout.max_new_tokens", "reward.max_score", "strategy.dtype",
            "strategy.reduce_dtype", "data.train.count", "data.eval.heldout.count", "reward.call.failed")  # fmt: skip


def leaves(node, key=""):
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name}".lstrip("."))
    else:
        yield key


def every_key():
    """The keys of all option files, as they stand in a config."""
    found = set()
    for path in CONFIG.rglob("*.yaml"):
        node = OmegaConf.to_container(OmegaConf.load(path))
        folder = path.relative_to(CONFIG).parts[:-1]
        place = (path.stem,) if folder == ("modes",) else folder
        found |= {".".join([*place, key]) for key in leaves(node)}
    return found


def test_a_key_changes_nothing_or_is_compared(resolved):
    config = resolved()
    for key in leaves(config):
        node, other = key.split("."), copy.deepcopy(config)
        inner = other
        for name in node[:-1]:
            inner = inner[name]
        inner[node[-1]] = "another"
        free = below(key, CHANGES_NOTHING)
        assert [change[0] for change in changed_keys(config, other, ())] == ([] if free else [key])


@pytest.mark.parametrize("key", COMPARED)
def test_what_changes_the_weights_is_compared(key):
    assert not below(key, CHANGES_NOTHING)


@pytest.mark.parametrize("pattern", [*CHANGES_NOTHING, *NEEDED_VALUES, *NEEDED_KEYS, *STEPS])
def test_every_pattern_is_of_a_key_of_the_config(pattern):
    assert any(below(key, [pattern]) for key in every_key()), "it has another name now"


def test_the_message_of_changes_and_the_overrides_that_undo_them():
    changes = changed_keys({"a": {"b": None}, "d": "x y", "e": [1]}, {"a": {"b": 0.5}, "d": "z", "e": []}, ())
    assert describe_changes(changes) == "a.b (null there, 0.5 here), d (x y there, z here), e ([1] there, [] here)"
    assert overrides(changes) == "a.b=null 'd=x y' 'e=[1]'"
    many = changed_keys(dict.fromkeys("abcdef", 1), dict.fromkeys("abcdef", 2), ())
    assert describe_changes(many).endswith("d (1 there, 2 here) and 2 other keys") and overrides(many) == ""
    assert describe_changes(many[:5]).endswith(" and 1 other keys") and "other" not in describe_changes(many[:4])


def test_a_node_of_one_side_alone():
    changes = changed_keys({"a": {"b": None}}, {"a": {"b": {"c": 1}}}, ())
    assert describe_changes(changes) == "a.b.c (no such key there, 1 here)" and overrides(changes) == ""


def test_what_a_checkpoint_cannot_be_loaded_with(resolved):
    grpo, ppo = resolved("actor.optimizer.lr=1e-3"), resolved("algorithm=ppo", "warmup.steps=7", "seed=3")
    assert {key.split(".")[1] for key, _, _ in unloadable_keys(grpo, ppo)} == {"critic_loss"}
    assert unloadable_keys(grpo, resolved("algorithm=gspo", "steps=7", "batch.prompts=2")) == []
    assert all(key.startswith("warmup.") for key, _, _ in unloadable_keys(grpo, resolved("warmup=none")))
    assert unloadable_keys(grpo, resolved("warmup=none"))
    assert unloadable_keys(grpo, resolved("actor/lora=lora"))[0][0].startswith("actor.lora.")
