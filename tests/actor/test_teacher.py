"""The teacher's columns against plain logits, and how a policy learns from them however rows lie."""

import pytest
import torch

from rft.actor.base import ModelContext
from rft.actor.teacher import Teacher, TeacherOptions
from rft.data.encode.tokenizer import characters
from tests.helpers import (
    ALPHABET,
    MODEL,
    make_algorithm,
    make_batch,
    make_strategy,
    same,
    small_actor,
    update,
    weights,
    yaml_options,
)

PADDED, PACKED = {"packing": False}, {"packing": True}
VOCABULARY = 19


def teacher_options(top_k, rows=PACKED, cap=30, **changes):
    given = {"path": None, "model_config": MODEL | {"hidden_size": 24}, "micro_batch_tokens": cap}
    given |= {"share_prefix": False, "liger": False, "trust_remote_code": False} | rows | changes
    return TeacherOptions(**yaml_options("teacher/teacher.yaml", top_k=top_k, **given))


def make_teacher(world, *options):
    context = ModelContext("teacher", world, make_strategy(world), characters(alphabet=ALPHABET), 7)
    return Teacher(context, teacher_options(*options))


def taught(teacher, batch, temperature=0.8):
    """The batch with what the teacher says of it."""
    found = teacher.compute(batch, ("logprobs", "top_ids", "top_logprobs"), temperature)
    return batch.clone().update({f"teacher_{name}": column for name, column in found.items()})


def by_row(actor, batch, temperature=0.8):
    """Log-probabilities (B, T, V) of each token's place, of one unpadded row at a time."""
    model = actor.plain_model()
    model.load_state_dict(dict(actor.weights()), assign=True)
    found = torch.zeros(*batch["loss_mask"].shape, VOCABULARY)
    for row, ids in enumerate(batch["tokens", "input_ids"]):
        real = ids[batch["tokens", "attention_mask"][row].bool()]
        with torch.no_grad():
            logits = model(input_ids=real[None]).logits[0] / temperature
        found[row, 1 : len(real)] = logits[:-1].log_softmax(-1)
    return found


@pytest.mark.parametrize(("top_k", "kept"), [(3, 3), (64, VOCABULARY)])
def test_the_likeliest_tokens_are_those_of_the_logits(world, top_k, kept):
    batch = make_batch()
    padded, packed = (taught(make_teacher(world, top_k, rows), batch) for rows in (PADDED, PACKED))
    whole, keep = by_row(make_teacher(world, top_k), batch), batch["loss_mask"]
    values, ids = whole.topk(kept)
    for found in (padded, packed):
        assert found["teacher_top_ids"].dtype == torch.int32 and found["teacher_top_ids"].shape == ids.shape
        assert torch.equal(found["teacher_top_ids"][keep].long(), ids[keep])
        same(found["teacher_top_logprobs"][keep], values[keep], 1e-5)
        same(found["teacher_logprobs"][keep], whole.gather(-1, batch["tokens", "input_ids"][..., None])[keep][:, 0])
        assert not found["teacher_top_ids"][~keep].any() and not found["teacher_top_logprobs"][~keep].any()


@pytest.mark.parametrize("top_k", [4, VOCABULARY])
def test_updates_are_the_same_however_rows_lie(world, top_k):
    algorithm = make_algorithm({"name": "reverse_kl"}, {"nll": {"name": "nll", "coef": 0.1}})
    after, numbers = [], []
    for rows, cap in ((PADDED, 10**6), (PACKED, 10**6), (PACKED, 13)):
        batch = taught(make_teacher(world, top_k, rows, cap), make_batch())
        policy = small_actor(world, cap=cap, rows=rows)
        numbers.append([update(policy, batch, algorithm, watch=("entropy",)) for _ in range(2)])
        after.append(weights(policy))
    for number in range(2):
        for way in (1, 2):
            for name in ("loss/reverse_kl", "loss/nll", "grad_norm", "entropy"):
                assert numbers[way][number][name] == pytest.approx(numbers[0][number][name], rel=1e-4), name
    assert numbers[0][1]["loss/reverse_kl"] < numbers[0][0]["loss/reverse_kl"]
    for way in (1, 2):
        same(after[way], after[0], 1e-5)


def test_with_the_whole_vocabulary_a_policy_learns_the_divergence_of_the_logits(world):
    teacher, policy = make_teacher(world, VOCABULARY), small_actor(world)
    batch, algorithm = make_batch(), make_algorithm({"name": "forward_kl"}, aggregation="token_mean")
    keep, wanted, own = batch["loss_mask"], by_row(teacher, batch), by_row(policy, batch)
    expected = (wanted.exp() * (wanted - own)).sum(-1)[keep].mean()
    assert update(policy, taught(teacher, batch), algorithm)["loss/forward_kl"] == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_a_teacher_of_other_tokens_is_refused(tmp_path):
    ours = characters(alphabet=ALPHABET)

    def check(path):
        teacher_options(4, path=path, model_config=None).check("teacher", ours, 1.0)

    with pytest.raises(ValueError, match=r"^teacher\.path is null, so there is no model to learn from"):
        check(None)
    with pytest.raises(ValueError, match=r"^teacher\.path: no model can be read from"):
        check(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 18}')
    ours.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^teacher\.path=\S+: the model knows 18 tokens, but actor\.tokenizer has 19"):
        check(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 32}')
    check(str(tmp_path))
    characters(alphabet=ALPHABET[::-1]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^teacher\.path=\S+: its tokenizer is not actor\.tokenizer: "):
        check(str(tmp_path))
