"""Conversations and texts through the whole of a run."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rft.distributed import stop
from rft.modes.plan.job import PlanJob
from rft.setup.assembly import Job
from tests.helpers import file_rows
from tests.helpers import numbers as numbers_of
from tests.modes.test_inspect import CHAT


@pytest.fixture
def chats(tiny, tmp_path):
    """The config of two steps on conversations of two rounds."""
    (tmp_path / "chat.jinja").write_text(CHAT)
    roles = ("user", "assistant") * 2
    rows = [[{"role": role, "content": str(n + k)} for k, role in enumerate(roles)] for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    config = tiny("algorithm=sft", "algorithm/source=conversation", "steps=2")
    config["data"] |= {"template": str(tmp_path / "chat.jinja"), "train": file_rows(tmp_path / "rows.jsonl")}
    config["actor"]["tokenizer"]["alphabet"] += "aus:;"
    return config


def test_conversations_train_and_the_checkpoint_has_the_template_and_its_ends(chats, tmp_path):
    template = CHAT.replace("(eos_token", "((unk_token if m.tool_calls else eos_token)")
    (tmp_path / "chat.jinja").write_text(template)
    Job(chats).fit("")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss/nll"] for line in lines if "loss/nll" in line]
    assert len(losses) == 2 and losses[1] < losses[0]
    [saved] = (tmp_path / "run" / "checkpoints").glob("step_*/**/tokenizer_config.json")
    tokenizer = AutoTokenizer.from_pretrained(saved.parent)
    assert tokenizer.chat_template == template
    ends = GenerationConfig.from_pretrained(saved.parent).eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<eos>", "<unk>"]


@pytest.mark.slow
def test_answers_train_with_their_weights(chats, tmp_path):
    rows = [json.loads(line)["messages"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    chats["steps"], losses = 1, {}
    for number, weights in enumerate(((1, 0), (0, 1), (0.5, 1))):
        for messages in rows:
            for message, weight in zip(messages[1::2], weights, strict=True):
                message |= {"weight": weight, "content": message["content"][-1]}  # one character
        # the weight of the row is 2, or 1 where its first question is even
        lines = [{"messages": row, "quality": 1 + int(row[0]["content"]) % 2} for row in rows]
        for quality in (None, "quality"):
            (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            chats["algorithm"]["source"]["weight"] = quality
            chats["output_dir"] = str(tmp_path / f"{number} {quality}")
            Job(chats).fit("")
            numbers = [json.loads(line) for line in (tmp_path / chats["output_dir"] / "metrics.jsonl").open()]
            losses[weights, quality] = next(line["loss/nll"] for line in numbers if "loss/nll" in line)
    for quality in (None, "quality"):  # all answers have two tokens
        first, second, both = (losses[weights, quality] for weights in ((1, 0), (0, 1), (0.5, 1)))
        assert both == pytest.approx((0.5 * first + second) / 1.5, rel=1e-5) and first != pytest.approx(second)
    assert losses[(0.5, 1), None] != pytest.approx(losses[(0.5, 1), "quality"], rel=1e-5)


def test_conversations_have_no_prompts_to_be_too_long(chats):
    chats["data"]["max_prompt_tokens"] = 9
    with pytest.raises(ValueError, match=r"data\.max_prompt_tokens=9: rows that are conversations or texts have no"):
        Job(chats).fit("")


def test_a_text_has_no_place_in_a_chat(tiny, chats):
    config = tiny("algorithm=pretrain")
    config["data"]["template"] = chats["data"]["template"]
    config["actor"]["tokenizer"]["alphabet"] += "aus:;"
    with pytest.raises(ValueError, match=r"a text without a prompt cannot be a chat; set data\.template=none"):
        Job(config).fit("")


def test_a_plan_of_texts_counts_the_whole_of_them(tiny):
    stop()
    assert PlanJob(tiny("algorithm=pretrain"), 1)._prompt_tokens == 18 - 6  # of an answer, in the tiny run


def learn_chats(resolved, tmp_path, *overrides):
    """Trains a base model on chats: its tokenizer ends texts with <eos>, and ChatML ends answers with <|im_end|>.

    Returns the folder of its export.
    """
    numbers = [str(7919 * n % 10**4).zfill(4) for n in range(1, 2000)]
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in numbers:
            asked = {"role": "user", "content": f"reverse {number}="}
            answer = {"role": "assistant", "content": number[::-1]}
            file.write(json.dumps({"messages": [asked, answer]}) + "\n")
    config = resolved(
        "algorithm=sft", "algorithm/source=conversation", "steps=80", "eval.every=80", "data.template=chatml",
        f"output_dir={tmp_path / 'run'}", *overrides,
    )  # fmt: skip
    config["data"]["train"] = file_rows(tmp_path / "rows.jsonl")
    tokens = config["actor"]["tokenizer"]
    tokens["_target_"], tokens["special"] = f"{tokens['_target_']}_and_tokens", ["<|im_start|>", "<|im_end|>"]
    tokens["alphabet"] += "cinu"
    Job(config).fit("")
    return tmp_path / "run" / "checkpoints" / "latest" / "actor"


@pytest.mark.slow
def test_a_base_model_that_learns_chats_stops_where_they_end(resolved, tmp_path):
    """The run stops there, and so does transformers alone with what it exports."""
    folder = learn_chats(resolved, tmp_path)
    first, *_, last = numbers_of(tmp_path / "run")
    assert first["eval/heldout/length"] > 8 and last["eval/heldout/length"] < 6
    assert last["eval/heldout/accuracy"] > 0.8
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "reverse 1234="}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert len(answer) < 8 and tokenizer.decode(answer).endswith("<|im_end|>")
