"""The reward term of a process reward model: the classifier's own probabilities, put together by hand."""

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.reward.models.test_scalar import save
from tests.reward.reward_of import reward_of

ROWS = [{"prompt": prompt} for prompt in ("1+1", "2", "9+9", "3")]
RESPONSES = ["1+2+10", "12", "", "+4++5+"]
STEPS = [["1", "2", "10"], ["12"], [""], ["4", "5"]]  # "+" stands between them
BY_HAND = {"min": min, "product": math.prod, "last": lambda p: p[-1], "mean": lambda p: sum(p) / len(p)}


def node(folder, **changes):
    options = {
        "template": "none",
        "template_arguments": {},
        "system": None,
        "tools": None,
        "dtype": "float32",
        "trust_remote_code": False,
    }
    target = {"_target_": "rft.reward.models.process_model.ProcessRewardModel", "weight": 1.0, "path": str(folder)}
    return target | options | {"separator": "+", "aggregate": "min", "micro_batch_tokens": 16} | changes


def probabilities(model, tokenizer):
    """Of the steps of each response, one step at a time: nothing behind it plays a part."""
    found = []
    for row, steps in zip(ROWS, STEPS, strict=True):
        texts = [row["prompt"] + "".join(f"{step}+" for step in steps[: n + 1]) for n in range(len(steps))]
        with torch.no_grad():
            logits = [model(**tokenizer(text, return_tensors="pt")).logits[0, -1] for text in texts]
        found.append([float(pair.softmax(0)[1]) for pair in logits])
    return found


def test_scores_are_made_of_the_probabilities_of_the_classifier(tmp_path):
    model, tokenizer = save(tmp_path, AutoModelForTokenClassification, num_labels=2)
    expected = probabilities(model, tokenizer)
    assert torch.tensor(expected[0]).std() > 0.01
    for aggregate, make in BY_HAND.items():
        reward = reward_of({"steps": node(tmp_path, aggregate=aggregate)}, accuracy="steps")
        reward.check()
        scores = reward.score(RESPONSES, ROWS)
        scores, _ = scores.total, scores.terms
        torch.testing.assert_close(scores, torch.tensor([make(steps) for steps in expected]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "labels", "message"),
    [
        (
            AutoModelForSequenceClassification,
            1,
            "Qwen3ForSequenceClassification with 1 labels is no token classifier with 2",
        ),
        (AutoModelForTokenClassification, 3, "Qwen3ForTokenClassification with 3 labels is no token classifier with 2"),
    ],
)
def test_what_is_no_process_reward_model_is_refused(tmp_path, kind, labels, message):
    save(tmp_path, kind, num_labels=labels)
    with pytest.raises(ValueError, match=rf"^reward\.terms\.steps\.path=.*: {message}; a run with actor\.head=step"):
        reward_of({"steps": node(tmp_path)}, accuracy="steps").check()


def test_a_separator_is_a_text(tmp_path):
    with pytest.raises(ValueError, match=r"^reward\.terms\.steps\.separator is empty"):
        reward_of({"steps": node(tmp_path, separator="")}, accuracy="steps")
