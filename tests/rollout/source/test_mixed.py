"""Batches of given or of sampled text: which of the two a step has, and that both draw from one order."""

import pytest
import torch

from rft.batch.columns import fields
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
from rft.rollout.source.mixed import MixedSource
from rft.rollout.source.rollout import RolloutSource
from tests.rollout.contexts import rollout_context

ROWS = [{"prompt": f"{n}=", "good": str(n) * (1 + n % 3)} for n in range(9)]
TOKENIZER = characters(alphabet="0123456789=")
ENCODER = Encoder(TOKENIZER, "none", None)
SAMPLING = Sampling(3, temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)
SEED = 2


class Engine:
    """Says two digits of the seed."""

    def generate(self, requests, sampling, on_completion=None):
        assert sampling is SAMPLING
        return [[self.say(f"{seed % 100:02}") for seed in request.seeds] for request in requests]

    def say(self, text):
        return Completion(TOKENIZER.encode(text, add_special_tokens=False), [-1.0, -1.0], "length", text, [6, 6])


def score(texts, rows):
    return torch.ones(len(texts)), {"right": torch.ones(len(texts))}


def source(world, share=0.5, prompts=4, samples=1, seed=SEED):
    context = rollout_context(world, Engine(), ENCODER, ROWS, prompts, samples, SAMPLING, seed, score=score)
    return MixedSource(of(share), context)


def told(batch):
    """By group and place in it: the whole row, what trains, and all fields."""
    ids, real = batch["tokens", "input_ids"], batch["tokens", "attention_mask"].bool()
    columns = zip(batch["group"], batch["unit"], ids, real, batch["response_mask"], fields(batch), strict=True)
    return {
        (int(group), int(unit)): (TOKENIZER.decode(row[there]), TOKENIZER.decode(row[trains]), field)
        for group, unit, row, there, trains, field in columns
    }


@pytest.mark.parametrize("samples", [1, 2])
def test_a_step_is_all_given_or_all_sampled_and_every_row_comes_once_an_epoch(samples, ranks):
    def draw(world):
        drawing = source(world, samples=samples)
        return [(drawing.samples(), drawing.next(Metrics())) for _ in range(9)]

    [alone] = ranks(1, draw)
    kinds, order = [sampled for sampled, _ in alone], RowSampler(range(9), SEED)
    assert len(set(kinds)) == 2, "there is something to tell apart"
    for sampled, batch in alone:
        other = RolloutSource.Options(redraw=None, interruption=None)
        facts = other.facts() if sampled else DatasetSource.Options(response="good").facts()
        assert set(batch.keys()) == set(facts.writes)
        said = {}
        for position, place in order.take(4):
            row = ROWS[place]
            if not sampled:
                said[position, position] = (row["prompt"] + row["good"] + "<eos>", row["good"] + "<eos>", row)
                continue
            for sample in range(samples):
                text = f"{row_seed(SEED, position, sample) % 100:02}"
                own = {"text": text, "finish_reason": "length"}
                said[position, position * samples + sample] = (row["prompt"] + text, text, row | own)
        assert told(batch) == said
    for (sampled, whole), (one, first), (other, second) in zip(alone, *ranks(2, draw), strict=True):
        assert sampled == one == other and told(first) | told(second) == told(whole)
        assert len(first) == len(second) == len(whole) / 2
    assert source(SINGLE_PROCESS).temperature == 0.7


def test_how_many_steps_are_sampled_is_up_to_the_share_and_which_to_seed_and_step(ranks):
    def kinds(share, steps, **options):
        def draw(world):
            drawing, found = source(world, share, **options), []
            for _ in range(steps):
                found.append(drawing.samples())
                assert ("scores" in drawing.next(Metrics()).keys()) == found[-1]
            return found

        [found] = ranks(1, draw)
        return found

    for share, seed in ((0.25, 1), (0.75, 7)):
        assert abs(sum(kinds(share, 400, prompts=1, seed=seed)) / 400 - share) < 0.04
    assert not any(kinds(0.0, 30)) and all(kinds(1.0, 30))
    assert kinds(0.5, 30) == kinds(0.5, 30, prompts=2, samples=3) != kinds(0.5, 30, seed=3)


def test_it_goes_on_where_it_was(ranks):
    def work(world):
        whole, resumed = source(world), source(world)
        for _ in range(3):
            whole.next(Metrics())
        resumed.load_state_dict(whole.state_dict())
        return [(told(whole.next(Metrics())), told(resumed.next(Metrics()))) for _ in range(6)]

    for pairs in ranks(2, work):
        assert all(one == other for one, other in pairs)


def of(share):
    return MixedSource.Options(response="good", sampled_share=share)


def test_its_facts():
    for share in (0.0, 0.5):
        facts = of(share).facts()
        assert facts.fields == ("prompt", "good") and facts.sampled == "sometimes" and facts.scores
        assert facts.given == GivenTexts(DatasetSource, DatasetSource.Options(response="good"))
    facts = of(1.0).facts()
    assert facts.fields == ("prompt",), "no response is ever asked for"
    assert facts.sampled == "always" and facts.given is None
    assert of(0.3).always_sampled() == of(1.0)
    assert of(0.0).always_sampled() == of(0.0), "no step ever is"


def test_it_has_no_options_of_dynamic_sampling():
    node = {"_target_": "rft.rollout.source.mixed.MixedSource", "response": "good", "sampled_share": 0.5}
    assert Target(node, "algorithm.source").options == of(0.5)
    with pytest.raises(ValueError, match=r"^algorithm\.source\.redraw: MixedSource takes response, sampled_share"):
        Target(node | {"redraw": None}, "algorithm.source")
