"""Scores of rows against transformers' own sequence classifiers, row by row and as a padded batch."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rft.actor.init import load_with_head
from rft.actor.scorers import ScoreNetwork, StepNetwork, check_scorer
from tests.actor.test_heads import F64, LENGTHS, MODELS, tokens_and_selection
from tests.helpers import SIZES

PAD = 0
TYPES = ("qwen3", "llama", "qwen2", "mistral", "phi")  # the others differ in their logits, which a score has none of
SCORED = [name for name, model in MODELS.items() if model["model_type"] in TYPES]
TINY_BERT = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def scorer(name="qwen3", pad=PAD, head="score"):
    config = AutoConfig.for_model(**SIZES | MODELS[name] | {"pad_token_id": None})
    model = load_with_head(None, config, 0, pad, head, "actor").to(F64).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def theirs(model, tokens):
    """The classifier's own score of each unpadded row, in a batch of one."""
    rows = [tokens["input_ids"][row, None, :length] for row, length in enumerate(LENGTHS)]
    return torch.stack([model(input_ids=row).logits[0, 0] for row in rows])


def last_selected(select):
    return [int(row.nonzero()[-1]) for row in select]


@pytest.mark.parametrize("name", SCORED)
def test_a_row_has_the_score_of_the_classifier_at_its_last_selected_token(name):
    model, (tokens, select) = scorer(name), tokens_and_selection()
    score = ScoreNetwork(model)(tokens, select, ("score",), 0.7)["score"]
    expected = torch.zeros(select.shape, dtype=F64)
    expected[torch.arange(4), last_selected(select)] = theirs(model, tokens)
    torch.testing.assert_close(score, expected, rtol=1e-9, atol=1e-9)
    assert expected.std() > 0.1
    whole = model(**tokens.to_dict()).logits[:, 0]  # padded on the right, and found by the padding token
    torch.testing.assert_close(score.sum(1), whole, rtol=1e-9, atol=1e-9)


def test_a_row_that_ends_in_the_padding_token_is_read_where_the_classifier_reads_it():
    """As with tokenizers that pad with their end token."""
    model, (tokens, select) = scorer(pad=7), tokens_and_selection()
    tokens["input_ids"] = torch.where(tokens["attention_mask"] == 0, 7, tokens["input_ids"])
    for row, length in enumerate(LENGTHS):
        tokens["input_ids"][row, length - 1] = 7
    score = ScoreNetwork(model)(tokens, select, ("score",), 1.0)["score"].sum(1)
    torch.testing.assert_close(score, model(**tokens.to_dict()).logits[:, 0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SCORED)
def test_a_selected_token_has_the_log_odds_that_the_token_classifier_gives_it(name):
    model, (tokens, select) = scorer(name, head="step"), tokens_and_selection()
    score = StepNetwork(model)(tokens, select, ("score",), 0.7)["score"]
    rows = [model(input_ids=tokens["input_ids"][row, None, :length]).logits[0] for row, length in enumerate(LENGTHS)]
    expected = torch.zeros(select.shape, dtype=F64)
    for row, logits in enumerate(rows):
        expected[row, : len(logits)] = logits.log_softmax(1) @ torch.tensor([-1.0, 1.0], dtype=F64)
    expected = torch.where(select, expected, 0.0)
    expected[:, 0] = 0.0  # no column speaks of a first token
    torch.testing.assert_close(score, expected, rtol=1e-9, atol=1e-9)
    assert expected[select].std() > 0.1


def test_gradients_are_those_of_the_classifier():
    model, (tokens, select) = scorer(), tokens_and_selection()
    weights, found = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=F64), []
    for scores in (ScoreNetwork(model)(tokens, select, ("score",), 1.0)["score"].sum(1), theirs(model, tokens)):
        found.append(torch.autograd.grad((weights * scores).sum(), list(model.parameters())))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_a_row_without_a_selected_token_has_no_score_and_every_gradient_is_there():
    network, (tokens, select) = ScoreNetwork(scorer()), tokens_and_selection()
    some = select.clone()
    some[1] = False
    score = network(tokens, some, ("score",), 1.0)["score"]
    assert score.any(1).tolist() == [True, False, True, True]
    network(tokens, torch.zeros_like(select), ("score",), 1.0)["score"].sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in network.parameters())


def test_the_width_of_the_padding_does_not_matter():
    network = ScoreNetwork(scorer())
    narrow, wide = (network(*tokens_and_selection(width), ("score",), 1.0)["score"] for width in (14, 31))
    torch.testing.assert_close(wide[:, :14], narrow, rtol=1e-10, atol=1e-10)


def test_the_head_is_drawn_from_the_seed_and_the_rest_is_that_of_the_path(tmp_path):
    config = AutoConfig.for_model(**SIZES | MODELS["qwen3"])
    language = AutoModelForCausalLM.from_config(config)
    language.save_pretrained(tmp_path)
    one, same, other = (load_with_head(str(tmp_path), config, seed, 5, "score", "actor") for seed in (1, 1, 2))
    assert torch.equal(one.score.weight, same.score.weight) and not torch.equal(one.score.weight, other.score.weight)
    torch.testing.assert_close(one.model.state_dict(), language.model.state_dict(), rtol=0, atol=0)
    assert (one.config.pad_token_id, config.pad_token_id) == (5, 0), "the config that was given is as it was"


def test_a_classifier_that_is_not_one_layer_on_the_last_token_is_refused():
    model = load_with_head(None, AutoConfig.for_model("bert", **TINY_BERT), 0, 0, "score", "actor")
    with pytest.raises(ValueError, match=r"^actor\.path: BertForSequenceClassification does not compute its score"):
        check_scorer(model, "actor.path")
    for name in SCORED:
        check_scorer(scorer(name), "actor.path")
        check_scorer(scorer(name, head="step"), "actor.path")


def test_a_type_without_a_classifier_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"^actor\.head=score: transformers has no sequence classifier of the type cohere"
    ):
        load_with_head(None, AutoConfig.for_model("cohere"), 0, 0, "score", "actor")
