"""Random rows in a jsonl file: each is refused in one line that names it, or becomes the tokens of a batch.

Tokens are ids of the vocabulary, as many as weights, and the same ones each time.
"""

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fuzzing.pieces import changed, text
from fuzzing.responses import TOOLS
from rft.batch.collate import collate
from rft.data.base import SourceContext
from rft.data.encode.encoder import Encoder
from rft.data.given.pairs import PairSource
from rft.data.given.steps import StepSource
from rft.data.given.supervised import DatasetOptions, DatasetSource, TextSource
from rft.data.rows.lazy import Row, located
from rft.data.rows.sources import FileRows

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<bos>", "<pad>")
IDS = 256 + len(SPECIAL)
QUESTION = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "1", "name": "add"}
ROWS: dict[str, list[dict[str, Any]]] = {
    "prompts": [
        {"prompt": "1+1?", "answer": 2},
        {"prompt": [QUESTION], "tools": TOOLS},
        {"prompt": [QUESTION, ANSWER]},
    ],
    "dataset": [{"prompt": "1+1?", "response": "2"}, {"prompt": [QUESTION], "response": [ANSWER]}],
    "text": [
        {"text": "one text"},
        {"text": [QUESTION, ANSWER, QUESTION, {**ANSWER, "weight": 0.5}]},
        {"text": [QUESTION, CALLS, RESULT, ANSWER], "tools": TOOLS},
    ],
    "pairs": [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3", "weight": 1.5},
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "3"}]},
    ],
    "labelled": [
        {"prompt": "1+1?", "completion": "2", "label": True, "weight": 1},
        {"prompt": [QUESTION], "completion": "3", "label": 0},
    ],
    "steps": [
        {"prompt": "1+1?", "steps": ["a", "b"], "labels": [1, 0.5]},
        {"prompt": [QUESTION], "steps": ["a"], "labels": [True]},
    ],
}
FIELDS = {
    "prompts": ("prompt",),
    "dataset": ("prompt", "response"),
    "text": ("text",),
    "pairs": ("prompt", "chosen", "rejected"),
    "labelled": ("prompt", "completion", "label"),
    "steps": ("prompt", "steps", "labels"),
}
ONE: Any = SimpleNamespace(rank=0, size=1)  # in place of a process group
FILE = "rows.jsonl"
LONGEST = 3000  # characters of a message


@cache
def encoder(template: str, train_on: Any) -> Encoder:
    """An encoder of bytes, in which no text is unknown."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", eos_token="<|im_end|>", pad_token="<pad>")
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.chat_template = CHATML
    return Encoder(made, template, None, train_on=train_on)


def make(random: Random) -> dict[str, Any]:
    """The kind of source, how rows are encoded, and the lines of a file."""
    kind = random.choice([*ROWS])
    rows = [random.choice(ROWS[kind]) for _ in range(2)]
    lines = [json.dumps(changed(random, row), ensure_ascii=random.random() < 0.5) for row in rows]
    if random.random() < 0.1:
        place = random.randrange(len(lines[0]) + 1)
        lines[0] = lines[0][:place] + text(random, longest=2) + lines[0][place + random.randrange(3) :]
    train_on = random.choice(("response", "assistant", "last", "all")) if kind in ("text", "dataset") else "response"
    return {"kind": kind, "template": random.choice(("chat", "chat", "none")), "train_on": train_on, "lines": lines}


def title(made: dict[str, Any]) -> str:
    """What inputs have in common whose faults are probably one."""
    return f"{made['kind']} {made['template']}"


def check(made: dict[str, Any]) -> None:
    """Raises an AssertionError, or whatever else is raised, where the outcome is none of those of the module."""
    try:
        found = [tokens(made) for _ in range(2)]
    except ValueError as error:
        said = str(error)
        assert "\n" not in said and len(said) < LONGEST, f"a message of several lines or {len(said)} characters: {said}"
        assert FILE in said, f"the message names no row: {said}"
        return
    assert found[0] == found[1], "other tokens when the rows are encoded again"


def tokens(made: dict[str, Any]) -> list[list[int]]:
    """The token ids of the rows of a file.

    Raises:
        ValueError: a row is refused.
    """
    own, found = encoder(made["template"], made["train_on"]), list[Any]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / FILE
        file.write_bytes("\n".join(made["lines"]).encode(errors="surrogatepass"))
        rows = FileRows(str(file), {}, None, None, "data.train").load(FIELDS[made["kind"]])
        texts = _texts(made["kind"], SourceContext(ONE, 0, own, rows, len(rows), (), False))
        for number in range(len(rows)):
            with located(rows, number):
                found += texts(rows[number])
    if made["kind"] != "prompts":
        batch = collate(found)
        weights = batch.get("token_weights", batch["response_mask"])
        assert batch["tokens", "input_ids"].shape == weights.shape, "other weights than tokens"
        masks = batch["tokens", "attention_mask"].bool()
        found = [ids[mask].tolist() for ids, mask in zip(batch["tokens", "input_ids"], masks, strict=True)]
    assert all(found) and all(0 <= token < IDS for ids in found for token in ids), "no ids of the vocabulary"
    return found


def _texts(kind: str, context: SourceContext) -> Callable[[Row], list[Any]]:
    """What makes batch rows, or the token ids of prompts, of a row."""
    if kind == "prompts":
        return lambda row: [list(context.encoder.prompt(row))]
    source = {
        "dataset": lambda: DatasetSource(DatasetOptions(response="response"), context),
        "text": lambda: TextSource(TextSource.Options(response="text"), context),
        "pairs": lambda: PairSource(PairSource.Options(chosen="chosen", rejected="rejected", margin=None), context),
        "labelled": lambda: DatasetSource(DatasetOptions(response="completion", weight="label"), context),
        "steps": lambda: StepSource(StepSource.Options(steps="steps", labels="labels", separator="\n"), context),
    }[kind]()
    return lambda row: source.texts(0, row)
