"""Padded, packed, with shared prompts: the same learning; what is computed is counted."""

import pytest
import torch

from rft.actor.packing.layout import shared_prefixes
from rft.setup.assembly import Job
from tests.helpers import ALL, LENGTHS, TERMS, close, make_algorithm, make_batch, same, small_actor, update, weights
from tests.strategy.updates_on_ranks import Recording

WAYS = {
    "padded": {"packing": False},
    "packed": {"packing": True},
    "shared": {"packing": True, "share_prefix": True},
}
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2]  # of the rows of 5 9 3, 12 7 4 and 10 6 tokens
PROMPTS = [2, 3, 5]  # that they begin with; as many as a row has but one, in the first two
SAVED = 2 * 2 + 2 * 3 + 1 * 5


def make_groups():
    """Rows with prompts, some tokens of which train."""
    batch = make_batch()
    batch["group"] = torch.tensor(GROUPS)
    for row, group in enumerate(GROUPS):
        batch["tokens", "input_ids"][row, : PROMPTS[group]] = 3 + group
        batch["tokens", "input_ids"][row, PROMPTS[group]] = 8 + row
    assert shared_prefixes(batch).tolist() == [PROMPTS[group] for group in GROUPS]
    assert any(batch["loss_mask"][row, : PROMPTS[group]].any() for row, group in enumerate(GROUPS))
    return batch


CASES = {
    "policy": ("actor", "lm", {"terms": TERMS}, {}),
    "policy, tied": ("actor", "lm", {"terms": TERMS}, {"tie_word_embeddings": True}),
    "groups": ("actor", "lm", {"aggregation": "group_mean"}, {}),
    "critic": ("critic", "value", {"aggregation": "token_mean"}, {}),
    "critic, tied": ("critic", "value", {}, {"tie_word_embeddings": True}),
    "windows": ("actor", "lm", {}, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
}


@pytest.mark.parametrize(
    ("case", "cap"),
    [
        *(("policy", 13), ("policy", 30), ("policy", ALL), ("policy, tied", 30), ("groups", 13), ("groups", ALL)),
        *(("critic", 13), ("critic", 30), ("critic", ALL), ("critic, tied", ALL), ("windows", 13)),
    ],
)
def test_updates_are_the_same_however_rows_lie(world, case, cap):
    key, head, options, model = CASES[case]
    algorithm, batch = make_algorithm(**options), make_groups()
    actors = {way: small_actor(world, key, head, cap, kind=Recording, rows=rows, **model) for way, rows in WAYS.items()}
    watch = ("entropy", "sum_p_squared") if head == "lm" else ()
    for number in range(2):
        numbers, gradients = {}, {}
        for way, actor in actors.items():
            numbers[way] = update(actor, batch, algorithm, watch=watch)
            gradients[way] = actor.strategy.gradient
            del numbers[way]["padding/waste"]
        del numbers["shared"]["prefix/shared"]
        for way in ("packed", "shared"):
            assert numbers[way] == pytest.approx(numbers["padded"], rel=1e-4, abs=1e-6)
            close(gradients[way], gradients["padded"], 1e-5 if number == 0 else 5e-5)
            close(weights(actors[way]), weights(actors["padded"]))


@pytest.mark.parametrize("cap", [13, 30, ALL])
@pytest.mark.parametrize("output", ["logprobs", "entropy", "sum_p_squared", "values"])
def test_columns_are_the_same_however_rows_lie(world, output, cap):
    head = "value" if output == "values" else "lm"
    batch, columns = make_groups(), {}
    for way, rows in WAYS.items():
        actor = small_actor(world, head=head, cap=cap, trains=False, rows=rows)
        with torch.no_grad():
            for parameter in actor.network.parameters():
                parameter += 0.1
        columns[way] = actor.compute(batch, (output,), 0.8)[output]
        assert (columns[way] != 0).equal(batch["loss_mask"])
    same(columns["packed"], columns["padded"], 1e-5)
    same(columns["shared"], columns["padded"], 1e-5)


def counted(actor):
    """A list to which every forward adds its tokens."""
    seen = []
    embedding = actor.network.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, ids, states: seen.append(ids[0].numel()))
    return seen


@pytest.mark.parametrize(
    ("way", "cap", "computed", "waste"),
    [
        ("padded", ALL, [8 * 12], 1 - sum(LENGTHS) / (8 * 12)),
        ("padded", 30, [24, 27, 15], 1 - sum(LENGTHS) / 66),
        ("packed", ALL, [sum(LENGTHS)], 0.0),
        ("packed", 30, [28, 28], 0.0),
        ("shared", ALL, [sum(LENGTHS) - SAVED], 0.0),
    ],
)
def test_what_is_computed(world, way, cap, computed, waste):
    actor = small_actor(world, cap=cap, rows=WAYS[way])
    seen = counted(actor)
    numbers = update(actor, make_groups(), make_algorithm())
    assert seen == computed
    assert numbers["padding/waste"] == (pytest.approx(waste) if waste else 0.0)


def test_the_share_of_tokens_that_others_of_the_group_have_computed(world):
    batch, algorithm = make_groups(), make_algorithm()
    numbers = update(small_actor(world, rows=WAYS["shared"]), batch, algorithm)
    assert numbers["prefix/shared"] == pytest.approx(SAVED / sum(LENGTHS))
    assert "prefix/shared" not in update(small_actor(world, rows=WAYS["packed"]), batch, algorithm)
    batch["group"] = torch.arange(8)
    assert update(small_actor(world, rows=WAYS["shared"]), batch, algorithm)["prefix/shared"] == 0.0


def test_groups_that_the_cap_cuts_share_in_every_part(world):
    """Rows of 12, 7 and 4 with a prompt of 3: under a cap of 13 the last two go together, and so on."""
    actor = small_actor(world, cap=13, rows=WAYS["shared"])
    seen = counted(actor)
    numbers = update(actor, make_groups(), make_algorithm())
    assert max(seen) <= 13 and sum(seen) == 10 + 3 + 12 + 8 + 11
    assert numbers["prefix/shared"] == pytest.approx((sum(LENGTHS) - sum(seen)) / sum(LENGTHS))


def test_padded_rows_cannot_share(tiny):
    """Said once, although critic and reference take over what the actor has."""
    said = r"\.share_prefix=true: padded rows cannot share tokens; set its packing=true as well\Z"
    with pytest.raises(ValueError, match=rf"\Aactor{said}"):
        Job(tiny("actor.packing=false", "actor.share_prefix=true"))
    with pytest.raises(ValueError, match=rf"\Acritic{said}"):
        Job(tiny("algorithm=ppo", "critic.packing=false", "actor.share_prefix=true"))
