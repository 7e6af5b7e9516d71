"""Checks of video that need torchvision; `test_video.py` runs them in a process that has it."""

import json
from dataclasses import replace

import pytest
import torch

from rft.data.encode.base import RichText
from rft.data.encode.processors import pretrained
from rft.errors import Problems
from rft.rollout.engine.base import Request
from rft.setup.assembly import Job
from tests.actor.forward.test_backbone import assert_packed_as_padded, by_the_model
from tests.data.encode.media.test_files import movie
from tests.families import family, frames
from tests.families.rows import OMNI, batch_of, columns, encoder, network_of, rows
from tests.families.video import READ, family_with_video
from tests.rollout.engine.test_hf_media import SAMPLING, engine_of


def asked(*videos, text="what?"):
    content = [{"type": "video", "video": video} for video in videos]
    return {"prompt": [{"role": "user", "content": [*content, {"type": "text", "text": text}]}], "response": "2"}


@torch.no_grad()
@pytest.mark.parametrize("name", READ)
def test_log_probabilities(name, tmp_path):
    """Rows with nothing, an image, a video and both: padded, packed, beside the probe, and of the engine."""
    one = family_with_video(name)
    encode, given = encoder(one), [rows(replace(one, kinds=("video",)))[0], *rows(one)]
    network, batch = network_of(one.model(), encode), batch_of(encode, given)
    facts, mask = encode.media_facts, batch["loss_mask"]
    padded = columns(network, batch, facts)["logprobs"]
    expected = torch.cat([by_the_model(network, encode, row) for row in given])
    torch.testing.assert_close(padded[mask], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(columns(network, batch, facts, with_probe=True)["logprobs"], padded, rtol=0, atol=1e-5)
    prompts = encode.prompts(given[:4])
    [*found] = engine_of(network.model, encode, tmp_path, 5).generate([Request(p, [0]) for p in prompts], SAMPLING)
    for prompt, [completion] in zip(prompts, found, strict=True):
        ids = torch.tensor([[*prompt, *completion.tokens]])
        inputs = {name: torch.tensor([prompt.column(name) + [0] * len(completion.tokens)]) for name in prompt.columns}
        logits = network.model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, **(prompt.media or {}))
        scores = logits.logits[0, len(prompt) - 1 : -1]
        scores[:, facts.placeholders] = -1e9
        own = scores.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(own, torch.tensor(completion.logprobs), rtol=0, atol=1e-5)
    assert_packed_as_padded(network, batch, facts)


def test_a_file_is_sampled_by_the_processor(tmp_path):
    """Two frames of each of three seconds, with their times in the prompt; a video in memory is taken whole."""
    one = family_with_video("qwen3_vl")
    encode, tokenizer = encoder(one), one.processor.tokenizer
    (tmp_path / "a.mp4").write_bytes(movie(count=24, rate=8))
    text = tokenizer.decode(encode.prompt(asked(str(tmp_path / "a.mp4"))))
    seconds = [float(part.split(" seconds>")[0]) for part in text.split("<") if " seconds>" in part]
    assert len(seconds) == 3 and seconds == sorted(seconds) and seconds[0] < 1 < 2 < seconds[-1] < 3
    whole = encode.prompt(asked(frames(0, 8)))
    assert encode.prompt(asked(list(frames(0, 8)))) == whole
    assert tokenizer.decode(whole).count(" seconds>") == 4
    one.processor.video_processor.fps = None
    one.processor.video_processor.do_sample_frames = False
    assert tokenizer.decode(encode.prompt(asked(movie(count=24, rate=8)))).count(" seconds>") == 12, "every frame"


def test_which_processors_take_video(tmp_path):
    one = family_with_video("qwen2_5_vl")
    one.processor.save_pretrained(tmp_path / "qwen")
    made = pretrained(tokenizer=one.processor.tokenizer, path=str(tmp_path / "qwen"), video_fps=1)
    assert {*made.slots} == {"image", "video"} and made.facts.refused == ["audio", "video"]
    assert made._processor.video_processor.fps == 1
    made.keeps_raw = True
    content = asked(frames(0))["prompt"]
    bare, media = made.take_media(content, as_parts=False)
    assert bare[0]["content"].startswith("<|vision_start|><|video_pad|>")
    with pytest.raises(ValueError, match=r"^the engine gets no video; set rollout=hf, or remove the row$"):
        made.encode(RichText(bare[0]["content"], media))
    other = family("smolvlm")  # its tensors of video have the names of those of images
    other.processor.save_pretrained(tmp_path / "smolvlm")
    assert {*pretrained(tokenizer=other.processor.tokenizer, path=str(tmp_path / "smolvlm")).slots} == {"image"}
    assert family_with_video(OMNI).processor.video_processor is not None


def test_a_run(resolved, tmp_path):
    """It samples, trains and writes the videos."""
    one = family_with_video("qwen2_5_vl")
    one.processor.save_pretrained(tmp_path / "model")
    one.model().save_pretrained(tmp_path / "model")
    for number in range(2):
        (tmp_path / f"{number}.mp4").write_bytes(movie(count=12 + 4 * number, rate=4))
    given = [
        {"prompt": "<video>what?", "videos": ["0.mp4"], "answer": "2"},
        {"prompt": "nothing?", "answer": "2"},
        {"prompt": asked("1.mp4")["prompt"], "answer": "2"},
        {"prompt": asked("0.mp4", "1.mp4")["prompt"], "answer": "2"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, given)))
    (tmp_path / "held.jsonl").write_text(json.dumps(given[0] | {"prompt": "<video>which?"}))
    (tmp_path / "score.py").write_text("def score(response, row):\n    return float(sum(map(ord, response)) % 7)\n")
    options = (
        "actor=hf", "actor/processor=pretrained", f"actor.path={tmp_path / 'model'}", "actor.processor.video_fps=2",
        "data=questions", f"data.train.path={tmp_path / 'rows.jsonl'}",
        f"data.eval.questions.path={tmp_path / 'held.jsonl'}", "rollout.max_new_tokens=6", "steps=1",
        "batch.prompts=4", "algorithm.group_size=4", "reward=function",
        f"reward.terms.function.function={tmp_path / 'score.py'}:score", f"output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    Job(resolved(*options)).fit("")
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    numbers = {key: value for row in logged for key, value in row.items() if isinstance(value, float)}
    assert numbers["grad_norm"] > 0 and numbers["rollout/logprob_gap"] < 1e-4
    assert len([*(tmp_path / "run" / "media").glob("*.mp4")]) == 2
    assert '<video class="medium"' in (tmp_path / "run" / "report.html").read_text()
    server = ("rollout.engine.servers.count=0", "rollout.engine.servers.addresses=[127.0.0.1:9]")
    for engine in ("vllm_server", "sglang"):
        with pytest.raises(Problems, match=r"data\.train: .*rows\.jsonl line 1: the engine gets no video; set roll"):
            Job(resolved(*options, f"output_dir={tmp_path / 'other'}", f"rollout={engine}", *server)).fit("")
    (tmp_path / "1.mp4").write_bytes(b"damaged")
    with pytest.raises(Problems, match=r"^data\.train: .*rows\.jsonl line 3: .*1\.mp4 cannot be read as a video \("):
        Job(resolved(*options, f"output_dir={tmp_path / 'other'}")).fit("")
