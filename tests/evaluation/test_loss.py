"""The loss of held-out texts: numbers by hand, the same on any number of ranks."""

import math
from contextlib import contextmanager

import pytest
import torch

from rft.algorithm.check import build_algorithm
from rft.algorithm.options import AlgorithmOptions
from rft.data.base import GivenTexts
from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.data.given.pairs import LabelledSource, PairSource
from rft.data.given.supervised import DatasetSource
from rft.evaluation.base import EvaluationContext
from rft.evaluation.loss import LossEvaluator, metric_names
from tests.helpers import NLL

TEXTS = [{"prompt": "a", "response": "12"}, {"prompt": "bb", "response": "2"}, {"prompt": "c", "response": "431"}]
PAIRS = [
    {"prompt": "a", "chosen": "12", "rejected": "1"},  # log-probabilities -0.8 and -0.6
    {"prompt": "bb", "chosen": "2", "rejected": "5"},  # -0.7 and -1.0
    {"prompt": "c", "chosen": "4", "rejected": "31"},  # -0.9 and -0.9
]
DPO = {"loss": {"name": "dpo", "beta": 0.5, "label_smoothing": 0.0}, "aggregation": None}
KTO = {"name": "kto", "beta": 0.5, "desirable_weight": 1.0, "undesirable_weight": 2.0}


@contextmanager
def silent(name, total):
    yield lambda done: None


class Model:
    """Its log-probability of a digit d is -d/10, and of any other token -0.5, times a factor."""

    def __init__(self, tokenizer, factor):
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        digits = [-int(token) / 10 if token.isdigit() else -0.5 for token in tokens]
        self._table = factor * torch.tensor(digits, dtype=torch.float64)

    def compute(self, batch, outputs, temperature, dummy):
        assert len(batch) and outputs == ("logprobs",) and temperature == 1.0
        return {"logprobs": self._table[batch["tokens", "input_ids"]] * batch["loss_mask"]}


def algorithm(**changes):
    return build_algorithm(AlgorithmOptions(**NLL | {"critic_loss": None} | changes), "algorithm")


def evaluate(world, made, source, rows):
    tokenizer = characters(alphabet="0123456789abc")
    models = {"actor": Model(tokenizer, 1.0), "reference": Model(tokenizer, 0.0)}
    context = EvaluationContext(world, Encoder(tokenizer, "none", None), {"held": rows})
    evaluator = LossEvaluator(context, made, source, models, 0)
    first = evaluator.run(silent)
    assert evaluator.run(silent) == first, "an evaluation changed the batch of the next one"
    return first


@pytest.mark.parametrize("size", [1, 2, 5])
def test_loss_and_perplexity_by_hand_on_any_number_of_ranks(ranks, size):
    source = GivenTexts(DatasetSource, DatasetSource.Options(response="response"))
    # each text ends with the end token: 3, 2 and 4 tokens, of 0.8, 0.7 and 1.3 nats
    expected = {"token_mean": 2.8 / 9, "seq_mean_token_mean": (0.8 / 3 + 0.7 / 2 + 1.3 / 4) / 3}
    for aggregation, loss in expected.items():
        made = algorithm(aggregation={"name": aggregation})
        for numbers, texts in ranks(size, lambda world, made=made: evaluate(world, made, source, TEXTS)):
            assert numbers == pytest.approx({"eval/held/loss": loss, "eval/held/perplexity": math.exp(2.8 / 9)})
            assert texts == {}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_pairs_by_hand_on_any_number_of_ranks(ranks, size):
    source = GivenTexts(PairSource, PairSource.Options(chosen="chosen", rejected="rejected", margin=None))
    expected = {
        "eval/held/loss": sum(math.log1p(math.exp(-0.5 * h)) for h in (-0.2, 0.3, 0.0)) / 3,
        "eval/held/accuracy": 1 / 3,
        "eval/held/margin": 0.5 * 0.1 / 3,
    }
    for numbers, _ in ranks(size, lambda world: evaluate(world, algorithm(**DPO), source, PAIRS)):
        assert numbers == pytest.approx(expected)


@pytest.mark.parametrize("size", [1, 2])
def test_weights_of_rows_by_hand_on_any_number_of_ranks(ranks, size):
    rows = [row | {"w": weight} for row, weight in zip(TEXTS, (2, 0, 0.5), strict=True)]
    source = GivenTexts(DatasetSource, DatasetSource.Options(response="response", weight="w"))
    # 3 tokens of 0.8 nats together and 4 of 1.3, in rows of 2 and 1/2
    expected = {
        "token_mean": (2 * 0.8 + 0.5 * 1.3) / (2 * 3 + 0.5 * 4),
        "seq_mean_token_mean": (2 * 0.8 / 3 + 0.5 * 1.3 / 4) / 2.5,
    }
    for aggregation, loss in expected.items():
        made = algorithm(aggregation={"name": aggregation})
        for numbers, _ in ranks(size, lambda world, made=made: evaluate(world, made, source, rows)):
            assert numbers["eval/held/loss"] == pytest.approx(loss)
    rows = [row | {"w": weight} for row, weight in zip(PAIRS, (2, 0, 0.5), strict=True)]
    source = GivenTexts(PairSource, PairSource.Options(chosen="chosen", rejected="rejected", margin=None, weight="w"))
    loss = (2 * math.log1p(math.exp(0.5 * 0.2)) + 0.5 * math.log(2)) / 2.5
    for numbers, _ in ranks(size, lambda world: evaluate(world, algorithm(**DPO), source, rows)):
        assert numbers["eval/held/loss"] == pytest.approx(loss)


def test_a_statistic_of_the_whole_set_does_not_depend_on_the_ranks(ranks):
    rows = [row | {"label": number % 2 == 0} for number, row in enumerate(TEXTS)]
    source = GivenTexts(LabelledSource, LabelledSource.Options(response="response", label="label"))
    made = algorithm(loss=KTO, aggregation=None)
    alone, *others = (ranks(size, lambda world: evaluate(world, made, source, rows))[0][0] for size in (1, 2, 5))
    assert alone.keys() == {f"eval/held/{name}" for name in metric_names(made)}
    # no row has a gain above 0, so the baseline is 0: sigmoid(0.4), 2 sigmoid(-0.35) of the bad row, sigmoid(0.65)
    losses = [1 / (1 + math.exp(-0.4)), 2 / (1 + math.exp(0.35)), 1 / (1 + math.exp(-0.65))]
    assert alone["eval/held/loss"] == pytest.approx(sum(losses) / 3)
    assert all(other == pytest.approx(alone) for other in others)


def test_an_unlikely_text_has_a_finite_perplexity(ranks):
    rows = [{"prompt": "a", "response": "9"}]
    made, source = algorithm(), GivenTexts(DatasetSource, DatasetSource.Options(response="response"))

    def run(world):
        tokenizer = characters(alphabet="0123456789abc")
        context = EvaluationContext(world, Encoder(tokenizer, "none", None), {"held": rows})
        return LossEvaluator(context, made, source, {"actor": Model(tokenizer, 1e4)}, 0).run(silent)[0]

    [numbers] = ranks(1, run)
    assert numbers["eval/held/loss"] == pytest.approx(7000) and math.isfinite(numbers["eval/held/perplexity"])
