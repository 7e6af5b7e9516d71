"""What tests of engines with media share."""

import torch

from tests import families


def wide_heads(monkeypatch):
    """Tiny models have heads of 32 numbers, since vLLM has no attention for smaller ones on a CPU."""
    monkeypatch.setitem(families.TEXT, "num_attention_heads", 1)
    monkeypatch.setitem(families.TEXT, "num_key_value_heads", 1)
    monkeypatch.setitem(families.SECTIONS, "mrope_section", [8, 4, 4])


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
