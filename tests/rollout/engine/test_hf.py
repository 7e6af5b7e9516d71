"""Sampling with transformers: which tokens are drawn, with which log-probabilities, and when a row ends."""

import math
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MinPLogitsWarper, PreTrainedTokenizerFast, TopKLogitsWarper, TopPLogitsWarper

from rft.registry import take
from rft.rollout.engine.base import Request
from rft.rollout.engine.hf import StopStrings, chunks, waves
from rft.rollout.engine.kv_cache import can_join
from rft.rollout.engine.sampling import FirstToken
from rft.setup.schema import Rollout
from tests.helpers import hf_engine
from tests.rollout.word_models import END, MODELS, VOCABULARY, ban_the_end, build, prompts_of, sampling


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [(5, 5, 5), (3, 11, 6, 1)])
def test_greedy_equals_generate(tokenizer, name, lengths):
    model = build(name)
    requests = [Request(prompt, [0, 1]) for prompt in prompts_of(*lengths)]
    found = hf_engine(model, tokenizer, 64).generate(requests, sampling(temperature=0.0, max_new_tokens=20))
    for request, completions in zip(requests, found, strict=True):
        whole = model.generate(torch.tensor([request.prompt]), max_new_tokens=20, do_sample=False)
        expected = whole[0, len(request.prompt) :].tolist()
        assert [c.tokens for c in completions] == [expected, expected]


def test_prompts_of_unlike_length_are_prefilled_apart_and_decoded_together(tokenizer):
    model = build()
    requests = [Request(prompt, [0, 1]) for prompt in prompts_of(2, 3, 2, 3, 2, 200)]
    assert len(chunks(sorted((request.prompt for request in requests), key=len))) == 2
    alone = [hf_engine(model, tokenizer, 64).generate([request], sampling())[0] for request in requests]
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        together = hf_engine(model, tokenizer, 64).generate(requests, sampling())
    finally:
        torch.use_deterministic_algorithms(False)
    assert [[c.tokens for c in found] for found in together] == [[c.tokens for c in found] for found in alone]


def test_only_full_attention_takes_the_growing_cache():
    assert [can_join(build(name).config) for name in ("qwen3", "llama", "sliding")] == [True, True, False]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.4, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_logprobs_are_those_of_a_teacher_forced_forward(tokenizer, name, options):
    model = build(name)
    requests = [Request(prompt, [10 + i, 20 + i, 30 + i]) for i, prompt in enumerate(prompts_of(4, 9, 2))]
    found = hf_engine(model, tokenizer, 64).generate(requests, sampling(**options))
    for request, completions in zip(requests, found, strict=True):
        for completion in completions:
            with torch.no_grad():
                logits = model(torch.tensor([request.prompt + completion.tokens])).logits[
                    0, len(request.prompt) - 1 : -1
                ]
            logits = logits / options.get("temperature", 1.0)
            if "top_k" in options:
                logits = TopKLogitsWarper(options["top_k"])(None, logits)
            if "top_p" in options:
                logits = TopPLogitsWarper(options["top_p"])(None, logits)
            if "min_p" in options:
                logits = MinPLogitsWarper(options["min_p"])(None, logits)
            expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected.float(), rtol=0, atol=1e-5)


def test_greedy_logprobs_are_those_of_temperature_one(tokenizer):
    model = build()
    (prompt,) = prompts_of(4)
    [[completion]] = hf_engine(model, tokenizer, 64).generate([Request(prompt, [0])], sampling(temperature=0.0))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).amax(-1)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "sliding"])
def test_a_row_does_not_depend_on_its_company(tokenizer, name):
    model = build(name)
    requests = [Request(p, [100 * i + j for j in range(4)]) for i, p in enumerate(prompts_of(3, 8, 8, 30, 2))]
    together = hf_engine(model, tokenizer, 64).generate(requests, sampling(max_new_tokens=40))
    lengths = {len(c.tokens) for completions in together for c in completions}
    assert len(lengths) > 4, "rows are to end at different times, so that the batch is compacted"
    in_waves = hf_engine(model, tokenizer, 3).generate(requests, sampling(max_new_tokens=40))
    reordered = hf_engine(model, tokenizer, 64).generate(requests[::-1], sampling(max_new_tokens=40))[::-1]
    for other in (in_waves, reordered):
        for theirs, ours in zip(other, together, strict=True):
            assert [c.tokens for c in theirs] == [c.tokens for c in ours]
            for a, b in zip(theirs, ours, strict=True):
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-6)
    alone = hf_engine(model, tokenizer, 64).generate([Request(requests[1].prompt, [102])], sampling(max_new_tokens=40))
    assert alone[0][0].tokens == together[1][2].tokens


def test_samples_differ_by_seed_and_repeat_by_seed(tokenizer):
    (prompt,) = prompts_of(6)
    [found] = hf_engine(build(), tokenizer, 64).generate([Request(prompt, [1, 2, 1])], sampling())
    assert found[0] == found[2]
    assert found[0].tokens != found[1].tokens


def test_first_tokens_follow_the_model(tokenizer):
    model = build()
    (prompt,) = prompts_of(5)
    [found] = hf_engine(model, tokenizer, 8192).generate(
        [Request(prompt, list(range(8000)))], sampling(max_new_tokens=1)
    )
    counts = torch.tensor([c.tokens[0] for c in found]).bincount(minlength=VOCABULARY)
    with torch.no_grad():
        expected = 8000 * model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    common = expected > 5
    assert common.sum() > 10
    chi_square = ((counts[common] - expected[common]) ** 2 / expected[common]).sum()
    assert chi_square < 73.4  # 40 degrees of freedom, p = 0.001


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_the_first_token_is_drawn_hot_and_the_rest_as_usual(tokenizer, temperature):
    model = build()
    (prompt,) = prompts_of(5)
    hot = sampling(max_new_tokens=4, temperature=temperature, top_k=3, first_token=FirstToken(30.0, 16))
    [found] = hf_engine(model, tokenizer, 4096).generate([Request(prompt, list(range(4000)))], hot)
    with torch.no_grad():
        first = TopKLogitsWarper(16)(None, model(torch.tensor([prompt])).logits[:, -1] / 30)[0].log_softmax(-1)
    counts = torch.tensor([c.tokens[0] for c in found]).bincount(minlength=VOCABULARY)
    likely = first > -math.inf
    assert likely.sum() == 16 and counts[~likely].sum() == 0
    expected = 4000 * first[likely].exp()
    assert ((counts[likely] - expected) ** 2 / expected).sum() < 37.7  # 15 degrees of freedom, p = 0.001
    for completion in found[:50]:
        assert completion.logprobs[0] == pytest.approx(float(first[completion.tokens[0]]), abs=1e-5)
        assert (completion.tokens[0] == END) == (len(completion.tokens) == 1), "an end token ends the text"
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) : -1]
        if temperature > 0:
            logits = TopKLogitsWarper(3)(None, logits / temperature)
        else:
            assert completion.tokens[1:] == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens[1:], dtype=torch.int64)[:, None])
        torch.testing.assert_close(torch.tensor(completion.logprobs[1:]), expected[:, 0].float(), rtol=0, atol=1e-5)
    assert any(completion.tokens == [END] and completion.finish_reason == "stop" for completion in found)


def test_a_hot_first_token_of_the_ordinary_kind_changes_nothing(tokenizer):
    engine, requests = hf_engine(build(), tokenizer, 64), [Request(prompt, [1, 2]) for prompt in prompts_of(3, 7)]
    plain = engine.generate(requests, sampling())
    assert engine.generate(requests, sampling(first_token=FirstToken(1.0, VOCABULARY))) == plain
    assert engine.generate(requests, sampling(first_token=FirstToken(30.0, 16))) != plain


def test_the_yaml_of_the_first_token(resolved):
    plain, fire = resolved()["rollout"], resolved("algorithm=fire", "rollout.first_token.temperature=20")["rollout"]
    assert plain["first_token"] is None
    assert fire == plain | {"first_token": {"temperature": 20, "top_k": 16}}
    options = Rollout(**take(fire, Rollout, "rollout", "Rollout"))
    assert options.first_token == FirstToken(20.0, 16) and options.truncates()
    for temperature in (0.0, 1.0):
        assert options.untruncated(temperature).first_token is None
    assert not Rollout(**take(plain, Rollout, "rollout", "Rollout")).truncates()


def test_no_end_token_is_forged(tokenizer):
    model = build()
    ban_the_end(model)
    requests = [Request(prompt, [0, 1], limits=[4, 99]) for prompt in prompts_of(3, 7)]
    for completions in hf_engine(model, tokenizer, 64).generate(requests, sampling(max_new_tokens=9)):
        assert [len(c.tokens) for c in completions] == [4, 9]
        assert {c.finish_reason for c in completions} == {"length"}
        assert all(END not in c.tokens and len(c.logprobs) == len(c.tokens) for c in completions)


def test_a_sampled_end_token_stays_and_ends_the_row(tokenizer):
    engine = hf_engine(build(), tokenizer, 64)
    [found] = engine.generate([Request(prompts_of(5)[0], list(range(200)))], sampling(max_new_tokens=15))
    assert {c.finish_reason for c in found} == {"stop", "length"}
    for completion in found:
        assert END not in completion.tokens[:-1]
        assert (completion.tokens[-1] == END) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.tokens) == 15
        assert f"w{END}" not in completion.text.split()


def test_end_tokens_of_the_generation_config_count_too(tokenizer):
    model = build()
    model.generation_config.eos_token_id = [7, 9]
    [found] = hf_engine(model, tokenizer, 64).generate([Request(prompts_of(5)[0], list(range(200)))], sampling())
    assert {c.tokens[-1] for c in found if c.finish_reason == "stop"} == {END, 7, 9}


def test_stop_strings(tokenizer):
    model = build()
    ban_the_end(model)
    engine = hf_engine(model, tokenizer, 64)
    requests = [Request(prompt, list(range(100))) for prompt in prompts_of(5, 8)]
    free = engine.generate(requests, sampling(max_new_tokens=20))
    stop = ["w5", "w6 w1"]
    held = engine.generate(requests, sampling(max_new_tokens=20, stop=stop))
    reasons = set()
    for unbound, bound in zip(free, held, strict=True):
        for whole, cut in zip(unbound, bound, strict=True):
            reasons.add(cut.finish_reason)
            assert cut.tokens == whole.tokens[: len(cut.tokens)]
            before = tokenizer.decode(cut.tokens[:-1], skip_special_tokens=True)
            assert not any(string in before for string in stop)
            text = tokenizer.decode(cut.tokens, skip_special_tokens=True)
            if cut.finish_reason == "stop":
                assert cut.text == text[: min(text.find(s) for s in stop if s in text)]
            else:
                assert len(cut.tokens) == 20 and cut.text == text and not any(string in text for string in stop)
    assert reasons == {"stop", "length"}


def test_stop_strings_over_the_bytes_of_a_character():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole)
    watch = StopStrings(tokenizer, ["é。日本"], 2)
    ids = tokenizer.encode("日本 café? é。日。é。日本x")
    hits = [watch.hit(torch.tensor([1]), torch.tensor([part])).tolist() for part in (ids[:3], ids[3:])]
    assert (hits[0][0] + hits[1][0]).index(True) == len(ids) - 2


def test_prefill_runs_once_a_prompt_and_decoding_follows_the_sampled_tokens(tokenizer):
    model = build()
    ban_the_end(model)
    seen = {"prefill": 0, "decode": 0}

    def hook(module, args, output):
        seen["decode" if args[0].shape[1] == 1 else "prefill"] += args[0].numel()

    model.get_input_embeddings().register_forward_hook(hook)
    rng = random.Random(1)
    limits = [[min(100, max(2, int(rng.lognormvariate(2.5, 1.0)))) for _ in range(8)] for _ in range(8)]
    requests = [
        Request(prompt, list(range(8)), limit) for prompt, limit in zip(prompts_of(*[10] * 8), limits, strict=True)
    ]
    found = hf_engine(model, tokenizer, 64).generate(requests, sampling(max_new_tokens=100))
    drawn = sum(len(c.tokens) for completions in found for c in completions)
    assert [[len(c.tokens) for c in completions] for completions in found] == limits
    assert max(map(max, limits)) * 64 > 3 * drawn, "the lengths are to be skewed"
    assert seen["prefill"] == 8 * 10
    assert drawn - 64 <= seen["decode"] <= 1.1 * drawn


def test_completions_are_announced_as_soon_as_they_are_finished(tokenizer):
    announced = []
    requests = [Request(prompt, [1, 2, 3], [9, 2, 5]) for prompt in prompts_of(4, 5)]
    found = hf_engine(build(), tokenizer, 4).generate(requests, sampling(), lambda *one: announced.append(one))
    assert sorted(announced, key=lambda one: one[:2]) == [
        (number, sample, completion) for number, group in enumerate(found) for sample, completion in enumerate(group)
    ]
    lengths = [len(completion.tokens) for number, _, completion in announced if number == 0]
    assert lengths == sorted(lengths) and len(set(lengths)) > 1, "the shortest of a wave comes first"


def test_requests_without_samples(tokenizer):
    engine = hf_engine(build(), tokenizer, 4)
    assert engine.generate([], sampling()) == []
    found = engine.generate([Request([5], []), Request([6], [1])], sampling())
    assert [len(completions) for completions in found] == [0, 1]


def test_waves_cut_a_request_only_where_it_must_be():
    requests = [Request([1] * length, list(range(count))) for length, count in ((9, 2), (3, 3), (5, 9))]
    assert list(waves(requests, 4)) == [
        [(1, range(0, 3))],
        [(2, range(0, 4))],
        [(2, range(4, 8))],
        [(2, range(8, 9)), (0, range(0, 2))],
    ]


def test_chunks_hold_prompts_of_like_length():
    prompts = [[1] * length for length in [10] * 40 + [200] * 3 + [9000] * 3]
    parts = chunks(prompts)
    assert [i for part in parts for i in part] == list(range(len(prompts)))
    assert [len(part) for part in parts] == [40, 3, 1, 1, 1]
