"""Which prompts end inside of a thought, and what of a text stands behind its thoughts."""

import pytest

from rft.batch.thoughts import MARKS, PromptThoughts, behind_thought
from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters_and_tokens

LETTERS = "\n /<>[]|:_=?.abcdefghijklmnopqrstuvwxyzTHINKSARDEG"
# A template of a model that always thinks, one of a model that may not, and one without special tokens at turns.
TURNS = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<eos>{% endfor %}"
OPENS = TURNS + "{% if add_generation_prompt %}<|turn|>assistant\n<think>\n{% endif %}"
SKIPS = TURNS + "{% if add_generation_prompt %}<|turn|>assistant\n<think>\n\n</think>\n\n{% endif %}"
PLAIN = TURNS + "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"


def tokenizer(special=()):
    return characters_and_tokens(alphabet=LETTERS, special=["<|turn|>", *special])


def opened(text, special=()):
    made = tokenizer(special)
    return PromptThoughts(made).opened(made(text).input_ids)


@pytest.mark.parametrize(("template", "mark"), [(OPENS, "<think>"), (SKIPS, None), (PLAIN, None)])
def test_the_rendered_prompt_decides(tmp_path, template, mark):
    path = tmp_path / "template.jinja"
    path.write_text(template)
    encoder = Encoder(tokenizer(), str(path), None)
    for question in ("one", "write <think> first", "use <think> and </think>", "end with <think>"):
        prompt = encoder.prompt({"prompt": question})
        assert encoder.thoughts.opened(prompt) == mark, question
        assert encoder.thoughts.entry(prompt) == ({} if mark is None else {"prompt_opens": mark})


@pytest.mark.parametrize("mark", MARKS)
def test_every_mark_of_the_table(mark):
    assert opened(f"a <|turn|>b {mark} \n") == mark
    assert opened(f"a <|turn|>b {mark} so {MARKS[mark]}") is None


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("a question. <think>\n", "<think>"),  # without a template the mark must be the end
        ("write <think> first. answer:", None),
        ("<|turn|>write <think> first. answer:", None),  # a BOS token
        ("<|turn|>a<|turn|>b\n<think>\nfirst, i", "<think>"),  # an answer that is continued
        ("<|turn|>a<|turn|>b\n<think>so</think> the answer", None),
        ("<|turn|>a <think><|turn|>b\n", None),
        ("", None),
    ],
)
def test_other_prompts(text, mark):
    assert opened(text) == mark


def test_a_mark_that_is_a_special_token():
    """It may open a thought. A closing mark that no text contains opens none, since its end could not be seen."""
    assert opened("a<|turn|>b<think>\n", ["<think>"]) == "<think>"
    assert opened("a<|turn|>b<think>\n", ["<think>", "</think>"]) is None
    assert opened("a<|turn|>b[THINK]\n", ["<think>", "</think>"]) == "[THINK]"


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("4", "4"),
        (" 4", " 4"),
        ("", ""),
        ("<think>so</think>\n\n4\n", "4\n"),
        ("so</think>4", "4"),
        ("<think>so</think>", ""),
        ("<think>so", None),
        (" \n<think>so", None),
        ("4 <think>or", "4 "),
        ("<think>a</think>4<think>b</think>5", "5"),
        ("<think>a</think>4<think>b", "4"),
        ("<think>a</think><think>b", None),
    ],
)
def test_what_stands_behind_the_thoughts(text, rest):
    assert behind_thought(text, "<think>", "</think>") == rest
