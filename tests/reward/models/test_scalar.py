"""The reward term of a model: its scores are the classifier's, and what is no classifier is refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rft.actor.loading.export import add_to_config
from rft.data.encode.tokenizer import characters
from tests.helpers import MODEL
from tests.reward.reward_of import reward_of

SIZES = MODEL | {"initializer_range": 0.3}
ROWS = [{"prompt": prompt, "answer": "12"} for prompt in ("1+1", "2", "1+2+3+4", "9+9")]
RESPONSES = ["2", "12", "10", ""]
EXACT = {"name": "exact_match", "weight": 1.0, "strip": True}


def save(folder, kind=AutoModelForSequenceClassification, pad="own", **changes):
    torch.manual_seed(0)
    tokenizer = characters(alphabet="0123456789+")
    shape = SIZES | {"vocab_size": len(tokenizer), "num_labels": 1} | changes
    model = kind.from_config(
        AutoConfig.for_model(**shape, pad_token_id=tokenizer.pad_token_id if pad == "own" else None)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


def node(folder, **changes):
    options = {"template": "none", "template_arguments": {}, "system": None, "tools": None}
    options |= {"micro_batch_tokens": 16, "dtype": "float32", "trust_remote_code": False, "normalize": False}
    target = {"_target_": "rft.reward.models.scalar.RewardModel", "weight": 0.5, "path": str(folder)}
    return target | options | changes


def by_row(model, tokenizer):
    """Of prompt, response and end token, one row at a time."""
    found = []
    for row, response in zip(ROWS, RESPONSES, strict=True):
        ids = tokenizer(row["prompt"] + response + "<eos>", return_tensors="pt").input_ids
        with torch.no_grad():
            found.append(model(input_ids=ids).logits[0, 0])
    return torch.stack(found)


@pytest.mark.parametrize("pad", ["own", "the tokenizer's"])
@pytest.mark.parametrize("cap", [1, 16, 10**6])
def test_scores_are_those_of_the_classifier_whatever_shares_a_forward(tmp_path, pad, cap):
    model, tokenizer = save(tmp_path, pad=pad)
    reward = reward_of({"right": EXACT, "model": node(tmp_path, micro_batch_tokens=cap)}, accuracy="right")
    reward.check()
    reward.place(torch.device("cpu"))
    scores = reward.score(RESPONSES, ROWS)
    total, terms = scores.total, scores.terms
    expected = by_row(model, tokenizer)
    assert expected.std() > 0.01
    torch.testing.assert_close(terms["model"], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, torch.tensor([0.0, 1.0, 0.0, 0.0]) + 0.5 * expected, rtol=1e-5, atol=1e-6)
    assert reward.fields == ("answer", "prompt")


def test_no_rows(tmp_path):
    save(tmp_path)
    scores = reward_of({"model": node(tmp_path)}, accuracy="model").score([], [])
    total, terms = scores.total, scores.terms
    assert total.shape == terms["model"].shape == (0,)


def test_it_computes_in_its_dtype(tmp_path):
    save(tmp_path)
    scores = [
        reward_of({"m": node(tmp_path, dtype=d)}, "m").score(RESPONSES, ROWS).total for d in ("float32", "bfloat16")
    ]
    assert not torch.equal(*scores)
    torch.testing.assert_close(*scores, rtol=0.1, atol=0.05)


def test_making_one_reads_nothing(tmp_path):
    reward_of({"model": node(tmp_path / "nothing")}, accuracy="model")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            AutoModelForCausalLM,
            {},
            r"^reward\.terms\.model\.path=.*: Qwen3ForCausalLM with 1 labels is no sequence class",
        ),
        (AutoModelForSequenceClassification, {"num_labels": 3}, r"Qwen3ForSequenceClassification with 3 labels is no"),
    ],
)
def test_what_is_no_classifier_with_one_label_is_refused(tmp_path, kind, changes, message):
    save(tmp_path, kind, **changes)
    with pytest.raises(ValueError, match=message):
        reward_of({"model": node(tmp_path)}, accuracy="model").check()


def test_what_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"^reward\.terms\.model\.path: no model can be read from '.*nothing'"):
        reward_of({"model": node(tmp_path / "nothing")}, accuracy="model").check()
    model, _ = save(tmp_path / "other")
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"^reward\.terms\.model\.path=.*bare: there is no tokenizer beside the model"):
        reward_of({"model": node(tmp_path / "bare")}, accuracy="model").check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paht": "x"}, r"^reward\.terms\.model\.paht: RewardModel takes .*did you mean path\?"),
        ({"dtype": "float"}, r"^reward\.terms\.model\.dtype: expected one of float32, bfloat16, float16"),
        ({"weight": None}, r"^reward\.terms\.model\.weight: expected number"),
        ({"_target_": "rft.reward.models.scalar.Nothing"}, r"^reward\.terms\.model\._target_: .* cannot be imported"),
    ],
)
def test_its_options_are_checked_as_all_are(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        reward_of({"model": node(tmp_path, **changes)}, accuracy="model")


def test_scores_are_normalized_by_the_moments_of_the_config_or_by_given_ones(tmp_path):
    model, tokenizer = save(tmp_path)
    expected = by_row(model, tokenizer)
    add_to_config({"mean": 0.25, "std": 0.5}, tmp_path)
    for normalize, (mean, std) in [(True, (0.25, 0.5)), ({"mean": 1.0, "std": 4.0}, (1.0, 4.0)), (False, (0.0, 1.0))]:
        reward = reward_of({"model": node(tmp_path, normalize=normalize)}, "model")
        reward.check()
        found = reward.score(RESPONSES, ROWS).terms["model"]
        torch.testing.assert_close(found, (expected - mean) / std, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("normalize", "message"),
    [
        (
            True,
            r"^reward\.terms\.model\.normalize=true: config\.json of .* has no mean and std, .*normalize={mean: <numb",
        ),
        ("yes", r"^reward\.terms\.model\.normalize: expected true or false or ScoreMoments, got 'yes'"),
        ({"mean": 0.0, "std": 0.0}, r"^reward\.terms\.model\.normalize"),
    ],
)
def test_what_cannot_normalize_is_refused_before_the_model_is_loaded(tmp_path, normalize, message):
    save(tmp_path)
    with pytest.raises(ValueError, match=message):
        reward_of({"model": node(tmp_path, normalize=normalize)}, "model").check()
