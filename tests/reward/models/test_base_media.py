"""Reward models that read media: their own processor and template make the rows, and they score as by themselves."""

import io

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rft.actor.init import load_with_head
from rft.data.encode.media.without_video import load_processor
from tests.families import family, picture, sound
from tests.reward.models import test_judge, test_scalar
from tests.reward.reward_of import reward_of

RESPONSES = ["two", "a cat", "none"]
QUESTION = {"text": "{prompt} {response} right?", "words": ["1", "0"]}


def save(folder, name, head=None):
    """A folder of a family with its processor: its language model, or a classifier."""
    one = family(name)
    one.model().save_pretrained(folder)
    model = one.model()
    if head is not None:
        config = AutoConfig.from_pretrained(folder)
        model = load_with_head(str(folder), config, 0, one.processor.tokenizer.pad_token_id, head, "actor")
        model.save_pretrained(folder)
    one.processor.save_pretrained(folder)
    return one, model.eval()


def rows(one):
    """Rows with one, none and two media: bytes of a file, and values."""

    def medium(number):
        if "image" not in one.kinds:
            return {"type": "audio", "audio": {"array": sound(number, 3200 + 800 * number), "sampling_rate": 16000}}
        picture(number, 16 + 8 * number, 16).save(file := io.BytesIO(), "png")
        return {"type": "image", "image": file.getvalue()}

    several = [medium(0), {"type": "text", "text": " or "}, medium(1), {"type": "text", "text": "?"}]
    return [
        {"prompt": [{"role": "user", "content": [medium(2), {"type": "text", "text": "how many?"}]}]},
        {"prompt": "what is it?"},
        {"prompt": [{"role": "user", "content": several}]},
    ]


def called(folder, one, row, text, answer=""):
    """What the processor of the folder makes of one row, called as its users call it."""
    processor, prompt = load_processor(str(folder)), row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if text is not None:
        content = messages[0]["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    rendered = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    parts = messages[0]["content"] if isinstance(messages[0]["content"], list) else []
    from PIL import Image

    images = [Image.open(io.BytesIO(part["image"])) for part in parts if part["type"] == "image"]
    audio = [part["audio"]["array"] for part in parts if part["type"] == "audio"]
    given = ({"images": images} if images else {}) | ({"audio": audio} if audio else {})
    return processor(text=[rendered + answer], **given, add_special_tokens=False, return_tensors="pt")


@pytest.mark.parametrize(("name", "cap"), [("qwen2_5_vl", 1), ("qwen2_5_vl", 10**6), ("qwen2_audio", 10**6)])
def test_the_score_of_a_row_with_media_is_that_of_model_and_processor_alone(name, cap, tmp_path):
    one, model = save(tmp_path, name, "score")
    given = rows(one)
    end = one.processor.tokenizer.eos_token
    with torch.no_grad():
        expected = torch.stack(
            [
                model(**called(tmp_path, one, row, None, response + end)).logits[0, 0]
                for row, response in zip(given, RESPONSES, strict=True)
            ]
        )
    assert expected.std() > 1e-3
    reward = reward_of({"model": test_scalar.node(tmp_path, template="chat", micro_batch_tokens=cap)}, "model")
    reward.check()
    for row in given:
        reward.check_row(row)
    reward.place(torch.device("cpu"))
    torch.testing.assert_close(reward.score(RESPONSES, given).terms["model"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_audio"])
def test_a_judge_reads_the_media_of_a_row(name, tmp_path):
    one, model = save(tmp_path, name)
    given = rows(one)
    good, bad = one.processor.tokenizer.convert_tokens_to_ids(["1", "0"])
    expected = []
    for row, response in zip(given, RESPONSES, strict=True):
        with torch.no_grad():
            logits = model(**called(tmp_path, one, row, f" {response} right?")).logits[0, -1]
        expected.append((logits[good] - logits[bad]).sigmoid())
    expected = torch.stack(expected)
    assert expected.std() > 1e-3
    options = {"template": "chat", "question": QUESTION, "micro_batch_tokens": 10**6}
    reward = reward_of({"judge": test_judge.node(tmp_path, **options)}, "judge")
    reward.check()
    reward.place(torch.device("cpu"))
    torch.testing.assert_close(reward.score(RESPONSES, given).terms["judge"], expected, rtol=1e-4, atol=1e-5)


def test_a_judge_that_writes_reads_the_media_of_a_row_and_writes_no_placeholder(tmp_path):
    one, model = save(tmp_path, "qwen2_5_vl")
    given, seen = rows(one), []
    tokenizer = one.processor.tokenizer
    options = {"template": "chat", "question": QUESTION, "micro_batch_tokens": 10**6}
    reward = reward_of({"judge": test_judge.writing(tmp_path, **options)}, "judge")
    reward.check()
    reward.place(torch.device("cpu"))
    term = reward.terms["judge"]
    term._grade = lambda text: float(seen.append(text) or len(seen))
    reward.score(RESPONSES, given)
    forbidden = list(term._processor.placeholders)
    assert tokenizer.convert_tokens_to_ids("<|video_pad|>") in forbidden
    expected = {
        tokenizer.decode(
            model.generate(
                **(inputs := called(tmp_path, one, row, f" {response} right?")),
                do_sample=False,
                max_new_tokens=8,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                suppress_tokens=forbidden,
            )[0, inputs["input_ids"].shape[1] :],
            skip_special_tokens=True,
        )
        for row, response in zip(given, RESPONSES, strict=True)
    }
    assert set(seen) == expected and len(expected) == 3


@pytest.mark.parametrize(
    ("term", "options"),
    [("model", {"template": "chat"}), ("judge", {"template": "chat", "question": QUESTION})],
)
def test_a_model_of_text_refuses_a_row_with_media_by_name(term, options, tmp_path):
    kind = AutoModelForSequenceClassification if term == "model" else test_judge.AutoModelForCausalLM
    test_scalar.save(tmp_path, kind)
    node = test_scalar.node if term == "model" else test_judge.node
    reward = reward_of({term: node(tmp_path, **options)}, term)
    first, second, _ = rows(family("llava"))
    reward.check_row(second)
    with pytest.raises(
        ValueError, match=rf"^reward\.terms\.{term}\.path=.*: the row has image, and .* text alone; name"
    ):
        reward.check_row(first)


def test_a_model_refuses_media_of_another_kind_and_a_folder_without_a_processor(tmp_path):
    save(tmp_path / "vision", "qwen2_5_vl", "score")
    reward = reward_of({"model": test_scalar.node(tmp_path / "vision", template="chat")}, "model")
    with pytest.raises(ValueError, match=r"the row has audio, and this model reads text and image alone"):
        reward.check_row(rows(family("qwen2_audio"))[0])
    save(tmp_path / "bare", "qwen2_5_vl", "score")
    for file in (tmp_path / "bare").glob("*processor_config.json"):
        file.unlink()
    reward = reward_of({"model": test_scalar.node(tmp_path / "bare", template="chat")}, "model")
    with pytest.raises(ValueError, match=r"^reward\.terms\.model\.path=.*bare: cannot load a processor"):
        reward.check()
