"""Writes docs/chats.md: how chats become tokens, what ends answers and what trains, for templates of known models.

python scripts/chat_page.py    # reads the templates of the installed package trl, which is not imported
"""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rft.data.encode.encoder import Encoder

PAGE = Path(__file__).resolve().parents[1] / "docs" / "chats.md"
SPEC = find_spec("trl")
FOLDER = Path(next(iter(SPEC.submodule_search_locations or []))) / "chat_templates" if SPEC else Path("/nowhere")
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
TOKENS = r"<[|｜][^|｜<>]+[|｜]>|</?[a-z_0-9]+>|<[A-Z_|]+>|\[/?[A-Z_]+\]|<[a-z_]+\|>|<\|[a-z_\"]+>"  # noqa: RUF001
FAMILIES = {
    "Qwen2.5": ("qwen2_5", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3 without thoughts": ("qwen3", {"enable_thinking": False}),
    "Qwen3.5": ("qwen3_5_think", {}),
    "Llama 3.1": ("llama3_1", {}),
    "Gemma 3": ("gemma3", {}),
    "Phi-3.5": ("phi3_5", {}),
    "DeepSeek-R1-Distill": ("deepseek_r1_distill", {}),
    "GLM-4.5": ("glm4moe", {}),
    "gpt-oss": ("gptoss", {}),
    "Nemotron 3": ("nemotron_3_nano", {}),
    "Nemotron 3 without thoughts": ("nemotron_3_nano", {"enable_thinking": False}),
}
QUESTION = {"role": "user", "content": "What is 2+2?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLING: list[dict[str, Any]] = [
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]
TWO: list[dict[str, Any]] = [
    QUESTION,
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "It is 6."},
]
THOUGHT = [
    QUESTION,
    {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is 4."},
]
CHATS = {"Two answers": TWO, "An answer with a thought": THOUGHT, "A call": CALLING}
HEAD = """\
# Chats

How the chat templates of well-known models turn conversations into text, and what of it trains, with
`data.template=chat` and [`data.train_on=response`](data.md#what-trains) on `messages`. Trained parts stand between
\u27e6 and \u27e7; `mode=inspect` prints the same of your own data. `python scripts/chat_page.py` writes this page from
the templates that the package trl 1.16 ships.

Where a template begins the thought in the prompt, a sampled answer begins inside of it. Where it drops the thoughts of
earlier answers, these do not train; a run says how many. GLM-4.5 writes no end behind an answer: the mark of the next
message ends it.

"""


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with a template of TRL; what looks like a special token in the template is one."""
    template = (FOLDER / f"{name}.jinja").read_text()
    words = Tokenizer(models.BPE(vocab={byte: n for n, byte in enumerate(_alphabet())}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    special = sorted(set(re.findall(TOKENS, template)))
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made.chat_template = template
    return made


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def marked(encoder: Encoder, messages: list[dict[str, Any]]) -> str:
    """The text of a conversation from its question on, with marks around what trains; or why it is refused."""
    try:
        ids, trains = encoder.example({"response": messages})
    except ValueError as error:
        return f"refused: {error}"
    text, open_ = "", False
    for token, flag in zip(ids, trains, strict=True):
        text += ("\u27e6" if flag else "\u27e7") * (flag != open_) + encoder.decode([token])
        open_ = flag
    text += "\u27e7" * open_
    return text[text.index(QUESTION["content"]) :].rstrip("\n")


def page() -> str:
    """The text of docs/chats.md."""
    rows, sections = [], []
    for family, (name, arguments) in FAMILIES.items():
        own = tokenizer(name)
        encoder = Encoder(own, "chat", None, arguments=arguments)
        chat = encoder.chat
        assert chat is not None
        opened = chat.prompt([QUESTION], None).partition(QUESTION["content"])[2].replace("\n", "\\n")
        end = own.convert_ids_to_tokens(encoder.end)
        options = ", ".join(f"`{key}: {str(value).lower()}`" for key, value in arguments.items())
        opened, end = (text.replace("|", "\\|") for text in (opened, end))
        rows.append(f"| {family} | {options} | `{opened}` | `{end}` |")
        blocks = [f"{title}:\n\n```text\n{marked(encoder, messages)}\n```\n" for title, messages in CHATS.items()]
        sections.append(f"## {family}\n\n" + "\n".join(blocks))
    table = [
        "| family | `data.template_arguments` | behind a question stands | an answer ends with |",
        "|---|---|---|---|",
        *rows,
    ]
    return HEAD + "\n".join(table) + "\n\n" + "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page())
