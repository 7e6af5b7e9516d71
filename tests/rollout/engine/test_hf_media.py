"""The engine samples from prompts with media what the trainer computes for them, and no placeholder."""

import pytest
import torch

from rft.actor.model import empty_like
from rft.batch.collate import collate
from rft.batch.media import media_entries
from rft.batch.trajectory import to_row
from rft.distributed import start
from rft.rollout.answers import uncut
from rft.rollout.engine.base import EngineContext, Request
from rft.rollout.engine.hf import HFEngine
from rft.rollout.engine.sampling import Sampling
from tests.families import family
from tests.families.rows import READ, columns, encoder, network_of, rows

SAMPLING = Sampling(max_new_tokens=6, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)


def engine_of(model, encode, tmp_path, max_rows):
    context = EngineContext(
        world=start("cpu"),
        model=empty_like(model, torch.device("cpu")),
        tokenizer=encode.processor.tokenizer,
        folder=tmp_path,
        engine_args={},
        lora=None,
        dtype=torch.float32,
        media=encode.media_facts,
    )
    engine = HFEngine(HFEngine.Options(max_rows=max_rows, dtype=None, cuda_graphs=False), context)
    engine.update_weights(1, model.state_dict().items())
    return engine


@torch.no_grad()
@pytest.mark.parametrize("name", READ)
def test_the_log_probabilities_of_the_engine_are_those_of_the_trainer(name, tmp_path):
    one = family(name)
    encode, model = encoder(one), one.model()
    prompts = encode.prompts(rows(one)[:3])
    engine = engine_of(model, encode, tmp_path, max_rows=5)  # the second prompt is in two waves
    requests = [Request(prompt, [10 * number + sample for sample in range(3)]) for number, prompt in enumerate(prompts)]
    found = engine.generate(requests, SAMPLING)
    answers = [(number, completion) for number, group in enumerate(found) for completion in group]
    assert not {token for _, completion in answers for token in completion.tokens} & set(encode.processor.placeholders)
    batch = collate(
        [to_row(uncut(completion).trajectory(prompts[number], {}), group=number, unit=unit)
         for unit, (number, completion) in enumerate(answers)]
    )  # fmt: skip
    batch["loss_mask"] = batch["response_mask"]
    assert len({id(entry) for entry in media_entries(batch)}) == 3  # rows of a group share their media
    logprobs = columns(network_of(model, encode), batch, encode.media_facts)["logprobs"]
    mask = batch["response_mask"]
    torch.testing.assert_close(logprobs[mask], batch["rollout_logprobs"][mask], rtol=0, atol=1e-5)
    [alone] = engine.generate([requests[2]], SAMPLING)
    assert [completion.tokens for completion in alone] == [completion.tokens for completion in found[2]]


def test_a_token_that_is_forbidden_is_not_sampled_where_it_is_the_likeliest(tmp_path):
    one = family("llava")
    encode, model = encoder(one), one.model()
    prompts = encode.prompts(rows(one)[:1])
    with torch.no_grad():
        model.lm_head.weight[encode.processor.placeholders] = 50 * model.lm_head.weight.abs().max()
    engine = engine_of(model, encode, tmp_path, max_rows=64)
    [completions] = engine.generate([Request(prompts[0], list(range(64)))], SAMPLING)
    sampled = {token for completion in completions for token in completion.tokens}
    assert not sampled & set(encode.processor.placeholders)
    engine.forbidden = ()
    [completions] = engine.generate([Request(prompts[0], list(range(64)))], SAMPLING)
    assert {token for completion in completions for token in completion.tokens} & set(encode.processor.placeholders)
