"""The processor and the model of every family fit together, by transformers alone."""

import pytest
import torch

from tests.families import FAMILIES, family, picture, sound

KINDS = [(name, kind) for name in FAMILIES for kind in family(name).kinds]
UNCHECKED = [("idefics3", "image"), ("qwen2_5_omni_thinker", "audio")]  # transformers drops features that have no place


def media(kind, *seeds):
    return (
        {"images": [picture(seed) for seed in seeds]} if kind == "image" else {"audio": [sound(seed) for seed in seeds]}
    )


def batch(made, kind, seed, text="hi"):
    return made.processor(text=[made.render(kind, text)], return_tensors="pt", **media(kind, seed))


@pytest.mark.parametrize("name, kind", KINDS)
def test_model_reads_what_the_processor_writes(name, kind):
    made = family(name)
    inputs = batch(made, kind, 1)
    held = inputs["input_ids"] == made.placeholders[kind]
    assert held.sum() == (5 if kind == "audio" else 4)
    assert made.processor.tokenizer.unk_token_id not in inputs["input_ids"]
    model = made.model()
    with torch.no_grad():
        logits = model(**inputs).logits
        other = model(
            **(inputs | {key: value for key, value in batch(made, kind, 2).items() if value.is_floating_point()})
        ).logits
    assert logits.shape == (*inputs["input_ids"].shape, len(made.processor.tokenizer))
    assert logits.isfinite().all()
    first = int(held[0].nonzero()[0])
    after = int(held[0].nonzero()[-1]) + 1
    torch.testing.assert_close(logits[:, :first], other[:, :first])
    assert ((logits - other).abs().amax(-1)[:, after:] > 1e-3).all()


@pytest.mark.parametrize("name, kind", [pair for pair in KINDS if pair not in UNCHECKED])
def test_model_refuses_another_number_of_placeholders(name, kind):
    made = family(name)
    inputs = batch(made, kind, 1)
    keep = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    keep[0, (inputs["input_ids"] == made.placeholders[kind])[0].nonzero()[0]] = False
    short = {key: value[:, keep[0]] if value.shape == keep.shape else value for key, value in inputs.items()}
    with pytest.raises((ValueError, RuntimeError)), torch.no_grad():
        made.model()(**short)


@pytest.mark.parametrize("name, kind", KINDS)
def test_model_generates(name, kind):
    made = family(name)
    inputs, model = batch(made, kind, 1), made.model()
    written = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    size = inputs["input_ids"].shape[1]
    assert written.shape == (1, size + 4)
    with torch.no_grad():
        scores = model(**inputs).logits[0, -1]
    scores[made.processor.tokenizer.eos_token_id] = -torch.inf  # min_new_tokens forbids it
    assert written[0, size] == scores.argmax()
