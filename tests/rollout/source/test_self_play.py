"""Pairs of a given answer and a sampled one."""

import pytest
import torch

from rft.batch.columns import GIVEN_COLUMNS, fields
from rft.data.base import GivenTexts
from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.data.given.supervised import DatasetSource
from rft.data.sampler import RowSampler
from rft.distributed import SINGLE_PROCESS
from rft.metrics import Metrics
from rft.registry import Target
from rft.rollout.engine.base import Completion, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.source.self_play import SelfPlaySource
from tests.rollout.contexts import rollout_context

ROWS = [{"prompt": f"{n}=", "good": str(n) * (1 + n % 3)} for n in range(9)]
TOKENIZER = characters(alphabet="0123456789=")
SAMPLING = Sampling(3, temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)

FACTS = SelfPlaySource.Options(response="good").facts()


class Engine:
    """Says two digits of the seed."""

    def generate(self, requests, sampling, on_completion=None):
        assert sampling is SAMPLING
        return [[self.say(f"{seed % 100:02}") for seed in request.seeds] for request in requests]

    def say(self, text):
        return Completion(TOKENIZER.encode(text, add_special_tokens=False), [-1.0, -1.0], "length", text, [6, 6])


def source(world, samples=1):
    encoder = Encoder(TOKENIZER, "none", None)
    context = rollout_context(world, Engine(), encoder, ROWS, 4, samples, SAMPLING, 2)
    return SelfPlaySource(SelfPlaySource.Options(response="good"), context)


def told(batch):
    """By unit and side: group, the whole row, what trains."""
    ids, real = batch["tokens", "input_ids"], batch["tokens", "attention_mask"].bool()
    return {
        (int(unit), bool(chosen)): (int(group), TOKENIZER.decode(row[there]), TOKENIZER.decode(row[trains]))
        for unit, chosen, group, row, there, trains in zip(
            batch["unit"], batch["chosen"], batch["group"], ids, real, batch["response_mask"], strict=True
        )
    }


@pytest.mark.parametrize("samples", [1, 2])
def test_a_pair_is_the_given_answer_and_one_that_is_sampled(samples, ranks):
    [batch] = ranks(1, lambda world: source(world, samples).next(Metrics()))
    assert set(batch.keys()) == {*GIVEN_COLUMNS, "chosen"} == set(FACTS.writes)
    assert batch["chosen"].tolist() == [True, False] * 4 * samples
    assert batch["truncated"].tolist() == [False, True] * 4 * samples
    found, order = told(batch), RowSampler(range(9), 2).take(4)
    assert len(found) == len(batch) == 8 * samples
    for position, place in order:
        row = ROWS[place]
        for sample in range(samples):
            unit, said = position * samples + sample, f"{row_seed(2, position, sample) % 100:02}"
            assert found[unit, True] == (position, row["prompt"] + row["good"] + "<eos>", row["good"] + "<eos>")
            assert found[unit, False] == (position, row["prompt"] + said, said)
    assert fields(batch)[0] == ROWS[order[0][1]] and fields(batch)[1]["text"] == f"{row_seed(2, 0, 0) % 100:02}"
    assert source(SINGLE_PROCESS).temperature == 0.7 and FACTS.fields == ("prompt", "good") and not FACTS.scores
    assert FACTS.sampled == "always"
    assert FACTS.given == GivenTexts(DatasetSource, DatasetSource.Options(response="good"))


def test_ranks_share_the_prompts(ranks):
    [alone] = ranks(1, lambda world: source(world).next(Metrics()))
    parts = ranks(2, lambda world: source(world).next(Metrics()))
    assert told(parts[0]) | told(parts[1]) == told(alone)
    assert len(parts[0]) == len(parts[1]) == 4
    assert not torch.isin(parts[0]["unit"], parts[1]["unit"]).any()


def test_its_pairs_have_no_weights():
    with pytest.raises(ValueError, match=r"^algorithm\.source\.weight: SelfPlaySource takes response"):
        Target(
            {"_target_": "rft.rollout.source.self_play.SelfPlaySource", "response": "good", "weight": "w"},
            "algorithm.source",
        )
