"""What tests of engines with media share."""

import pytest
import torch

from rft.batch.encoded import EncodedText, MediaFacts
from rft.rollout.engine.base import Request
from rft.rollout.engine.expanded import OtherPrompt
from tests import families

MEDIA = MediaFacts(("video",), (9, 8), EncodedText([]), frozenset(), lambda folder: None)  # of a processor


def family_for_vllm(name, monkeypatch):
    """A family in a size that vLLM takes on a CPU: heads of 32 numbers, and sounds of 30 seconds."""
    monkeypatch.setitem(families.TEXT, "num_attention_heads", 1)
    monkeypatch.setitem(families.TEXT, "num_key_value_heads", 1)
    monkeypatch.setitem(families.SECTIONS, "mrope_section", [8, 4, 4])
    monkeypatch.setitem(families.SPECTRA, "chunk_length", 30)
    one = families.family(name)
    if name == "qwen2_audio":
        one.config.audio_config.max_source_positions = 1500
    return one


def off_with_media(policy, media, request, answer):
    """The largest difference between the log-probabilities of a completion and those of the model, whose placeholders
    cannot follow."""
    prompt, answered = request.prompt, [0] * len(answer.tokens)
    ids = torch.tensor([list(prompt) + answer.tokens])
    columns = {name: torch.tensor([prompt.column(name) + answered]) for name in prompt.columns}
    given = columns | (prompt.media or {}) | {"attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        logits = policy(input_ids=ids, **given).logits[0, len(prompt) - 1 : -1]
    logits[:, media.placeholders] = -torch.inf
    said = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    return float((said - torch.tensor(answer.logprobs)).abs().max())


def check_samples_with_media(one, encode, engine, requests, how, versions):
    """Samples have the log-probabilities of the model and no placeholders, after every update of the weights, and a
    prompt that the engine expands to other tokens is refused. Requests 0 and 2 have media."""
    media = encode.media_facts
    assert [request.prompt.raw is None for request in requests] == [False, True, False, True]
    for version in versions:  # the engine keeps the embeddings of media that it has seen, and must drop them
        policy = one.model(version)
        engine.update_weights(version, iter(policy.state_dict().items()))
        for request, group in zip(requests, engine.generate(requests, how), strict=True):
            for answer in group:
                assert off_with_media(policy, media, request, answer) < 1e-5
                assert not set(answer.tokens) & set(media.placeholders)
    prompt = requests[0].prompt
    place = next(number for number, token in enumerate(prompt) if token in media.placeholders)
    other = EncodedText([*prompt[:place], 5, *prompt[place + 1 :]], prompt.columns, prompt.media, prompt.raw)
    with pytest.raises(OtherPrompt, match=rf"prompt 0: .* at position {place}, behind .*\(5\) for the trainer"):
        engine.generate([Request(other, [1])], how)
