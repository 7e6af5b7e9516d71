"""Checks of Llama 4 with images; `test_torchvision.py` runs them in a process that has torchvision."""

import json

import pytest
import torch
from transformers import AutoModelForMultimodalLM

from rft.actor.packing.attention import use_packed_attention
from rft.data.encode.media.without_video import load_processor
from rft.rollout.engine.base import Request
from rft.setup.assembly import Job
from tests.actor.forward.test_backbone import by_the_model
from tests.families import picture
from tests.families.llama4 import llama4
from tests.families.rows import batch_of, columns, encoder, network_of, rows
from tests.rollout.engine.test_hf_media import SAMPLING, engine_of


@torch.no_grad()
def test_log_probabilities(tmp_path):
    """Rows with one, none and two images: padded, in another order, beside the probe, and of the engine."""
    one = llama4()
    encode, given = encoder(one), rows(one)
    network, batch = network_of(one.model(), encode), batch_of(encode, given)
    facts, mask = encode.media_facts, batch["loss_mask"]
    padded = columns(network, batch, facts)["logprobs"]
    expected = torch.cat([by_the_model(network, encode, row) for row in given])
    torch.testing.assert_close(padded[mask], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(columns(network, batch, facts, with_probe=True)["logprobs"], padded, rtol=0, atol=1e-5)
    turned = columns(network, batch[[2, 3, 0, 1]], facts)["logprobs"]
    torch.testing.assert_close(turned[[2, 3, 0, 1]], padded, rtol=0, atol=1e-5)
    prompts = encode.prompts(given)
    patch = one.processor.tokenizer.convert_tokens_to_ids("<|patch|>")
    assert [prompt.count(patch) for prompt in prompts] == [4, 0, 24, 0], "images of one tile, and of two and the whole"
    [*found] = engine_of(network.model, encode, tmp_path, 5).generate([Request(p, [0, 1]) for p in prompts], SAMPLING)
    for prompt, answers in zip(prompts, found, strict=True):
        for completion in answers:
            media = {name: tensor.to(network.model.dtype) for name, tensor in (prompt.media or {}).items()}
            ids = torch.tensor([[*prompt, *completion.tokens]])
            logits = network.model(input_ids=ids, attention_mask=torch.ones_like(ids), **media).logits
            scores = logits[0, len(prompt) - 1 : -1]
            scores[:, facts.placeholders] = -1e9
            own = scores.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            torch.testing.assert_close(own, torch.tensor(completion.logprobs), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"^actor\.packing: .*chunked_attention.*set actor\.packing=false$"):
        use_packed_attention(network.model, "actor", facts)


def test_a_run(resolved, tmp_path):
    """It samples, trains both parts, and its export is read by transformers and by another run."""
    one = llama4()
    one.processor.save_pretrained(tmp_path / "model")
    first = one.model()
    first.save_pretrained(tmp_path / "model")
    for number in range(2):
        picture(number, 16 + 16 * number).save(tmp_path / f"{number}.png")
    given = [
        {"prompt": "<image>what?", "images": ["0.png"], "answer": "2"},
        {"prompt": "nothing?", "answer": "2"},
        {"prompt": "<image>what?", "images": ["1.png"], "answer": "2"},
        {"prompt": "<image> and <image>?", "images": ["0.png", "1.png"], "answer": "2"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, given)))
    (tmp_path / "held.jsonl").write_text(json.dumps(given[0] | {"prompt": "<image>which?"}))
    (tmp_path / "score.py").write_text("def score(response, row):\n    return float(sum(map(ord, response)) % 7)\n")

    def run(path, name, *options):
        given = (
            "actor=hf", "actor/processor=pretrained", f"actor.path={path}", "data=questions",
            f"data.train.path={tmp_path / 'rows.jsonl'}", f"data.eval.questions.path={tmp_path / 'held.jsonl'}",
            "rollout.max_new_tokens=6", "steps=1", "batch.prompts=4", "algorithm.group_size=4", "reward=function",
            f"reward.terms.function.function={tmp_path / 'score.py'}:score", "checkpoint.every=1",
            "actor.packing=false", f"output_dir={tmp_path / name}",
        )  # fmt: skip
        Job(resolved(*given, *options)).fit("")
        logged = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        numbers = {key: value for row in logged for key, value in row.items() if isinstance(value, float)}
        assert numbers["grad_norm"] > 0 and numbers["rollout/logprob_gap"] < 1e-4
        return tmp_path / name / "checkpoints" / "latest" / "actor"

    exported = run(tmp_path / "model", "first")
    assert type(load_processor(str(exported))).__name__ == "Llama4Processor"
    trained, before = AutoModelForMultimodalLM.from_pretrained(exported).state_dict(), first.state_dict()
    assert trained.keys() == before.keys()
    for part in ("vision_model", "multi_modal_projector", "language_model"):
        assert any(part in name and not torch.equal(trained[name], before[name]) for name in before), part
    run(exported, "second", "algorithm=ppo")
