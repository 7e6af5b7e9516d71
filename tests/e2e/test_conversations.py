"""Conversations and texts through the whole of a run."""

import json

import pytest
from transformers import AutoTokenizer

from rft.distributed import stop
from rft.modes.plan.job import PlanJob
from rft.setup.assembly import Job
from tests.modes.test_inspect import CHAT


@pytest.fixture
def chats(tiny, tmp_path):
    """The config of two steps on conversations of two rounds."""
    (tmp_path / "chat.jinja").write_text(CHAT)
    roles = ("user", "assistant") * 2
    rows = [[{"role": role, "content": str(n + k)} for k, role in enumerate(roles)] for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    config = tiny("algorithm=sft", "algorithm/source=conversation", "steps=2")
    node = {
        "_target_": "rft.data.rows.sources.FileRows",
        "path": str(tmp_path / "rows.jsonl"),
        "columns": {},
        "schema": None,
    }
    config["data"] |= {"template": str(tmp_path / "chat.jinja"), "train": {**node, "limit": None}}
    config["actor"]["tokenizer"]["alphabet"] += "aus:;"
    return config


def test_conversations_train_and_the_checkpoint_has_the_template(chats, tmp_path):
    Job(chats).fit("")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss/nll"] for line in lines if "loss/nll" in line]
    assert len(losses) == 2 and losses[1] < losses[0]
    [saved] = (tmp_path / "run" / "checkpoints").glob("step_*/**/tokenizer_config.json")
    assert AutoTokenizer.from_pretrained(saved.parent).chat_template == CHAT


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
