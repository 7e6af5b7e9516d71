"""The tokenizer of a folder is read from its GGUF file as it was."""

import sys
from functools import partial
from pathlib import Path

import pytest
from gguf import TokenType
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, GenerationConfig

from rft.actor.loading.gguf import folder_of
from rft.actor.loading.gguf_facts import LLAMA3, QWEN2, SPLITS
from rft.data.encode.tokenizer import characters
from tests.scripts.conversion.gguf_folders import GPT2, MERGES, TEMPLATE, byte_level, read, save

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import convert  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
HARD = [
    "the  the 12345678 1,234.5\n\n\t the", "   12", "don't WE'LL", "é 🙂🇩🇪 日本語 ½²٣", "<|turn|>user\nhi<eos>\n ", "",
    " ", "\u00a0\u2003z\r\n", "x" * 30, "<note>the</note>",
]  # fmt: skip


def split(pattern):
    """The pre-tokenizer of an expression, before that of bytes."""
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_alone])


@pytest.fixture
def run(run_script):
    """Runs the section `to-gguf`; see `run_script`."""
    return partial(run_script, convert.main, "to-gguf")


SPLITTERS = {
    "gpt-2": {},
    "smollm": {"splitter": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])},
    "qwen2": {"splitter": split(QWEN2), "normalizer": normalizers.NFC()},
    "smaug-bpe": {"splitter": split(LLAMA3)},
    "llama-bpe": {"splitter": split(LLAMA3), "ignore_merges": True},
}
NFC = "note: the tokenizer composes Unicode (NFC), llama.cpp does not; decomposed text gets other tokens\n"


@pytest.mark.parametrize("name", SPLITS)
def test_a_run_reads_the_same_tokenizer(name, run, tmp_path):
    tokenizer = byte_level(**SPLITTERS[name])
    save(tmp_path / "model", tokenizer=tokenizer)
    expected = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert expected.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert run(tmp_path / "model", "--out", tmp_path / "out.gguf") == (0, NFC if name == "qwen2" else "")
    _, fields = read(tmp_path / "out.gguf")
    assert fields["tokenizer.ggml.pre"] == name
    folder = folder_of(str(tmp_path / "out.gguf"), "float32", str(tmp_path / "cache"), "actor.path", lambda line: None)
    found = AutoTokenizer.from_pretrained(folder)
    assert [found(text).input_ids for text in HARD] == [expected(text).input_ids for text in HARD]
    assert found.chat_template == TEMPLATE
    assert (found.eos_token, found.pad_token, found.bos_token) == ("<eos>", "<pad>", None)


def test_rows_without_a_token_are_unused(run, tmp_path):
    tokenizer = byte_level()
    save(tmp_path / "model", tokenizer=tokenizer)
    run(tmp_path / "model", "--out", tmp_path / "out.gguf")
    _, fields = read(tmp_path / "out.gguf")
    texts, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len(texts) == len(types) == 300 and len(tokenizer) == 268
    assert texts[:3] == ["<eos>", "<|turn|>", "<pad>"] and types[:4] == [TokenType.CONTROL] * 3 + [TokenType.NORMAL]
    assert (texts[267], types[267]) == ("<note>", TokenType.USER_DEFINED)
    assert texts[268:] == [f"[PAD{number}]" for number in range(268, 300)]
    assert set(types[268:]) == {TokenType.UNUSED}
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in MERGES]


@pytest.mark.parametrize("single", ["<|turn|> $A", "$A <eos>", "<|turn|> $A <eos>"])
def test_tokens_around_a_text(single, run, tmp_path):
    tokenizer = byte_level(bos_token="<|turn|>")
    around = processors.TemplateProcessing(single=single, special_tokens=[("<|turn|>", 1), ("<eos>", 0)])
    tokenizer.backend_tokenizer.post_processor = around
    save(tmp_path / "model", tokenizer=tokenizer)
    assert run(tmp_path / "model", "--out", tmp_path / "out.gguf") == (0, "")
    _, fields = read(tmp_path / "out.gguf")
    assert fields["tokenizer.ggml.add_bos_token"] is single.startswith("<|turn|>")
    assert fields["tokenizer.ggml.add_eos_token"] is single.endswith("<eos>")
    assert fields["tokenizer.ggml.bos_token_id"] == 1


def test_every_token_that_ends_a_text_is_named(run, tmp_path):
    save(tmp_path / "model")
    GenerationConfig(eos_token_id=[5, 0, 7, 9]).save_pretrained(tmp_path / "model")
    code, said = run(tmp_path / "model", "--out", tmp_path / "out.gguf")
    left = byte_level().convert_ids_to_tokens(9)
    assert (code, said) == (0, f"note: a file has three tokens that end a text; left out: {left}\n")
    _, fields = read(tmp_path / "out.gguf")
    assert [fields[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")] == [0, 5, 7]


def test_templates_with_names_and_none(run, tmp_path):
    tokenizer = byte_level()
    tokenizer.chat_template = {"default": TEMPLATE, "tools": "{{ tools }}"}
    save(tmp_path / "model", tokenizer=tokenizer)
    assert run(tmp_path / "model", "--out", tmp_path / "two.gguf") == (0, "")
    _, fields = read(tmp_path / "two.gguf")
    assert fields["tokenizer.chat_template"] == TEMPLATE and fields["tokenizer.chat_template.tools"] == "{{ tools }}"
    tokenizer.chat_template = None
    save(tmp_path / "none", tokenizer=tokenizer)
    code, said = run(tmp_path / "none", "--out", tmp_path / "none.gguf")
    assert code == 0 and said.startswith("note: the tokenizer has no chat template; llama.cpp takes one of its own")


def stripping():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def between():
    tokenizer = byte_level()
    around = processors.TemplateProcessing(single="<|turn|> $A", special_tokens=[("<|turn|>", 1)])
    tokenizer.backend_tokenizer.post_processor = around
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (characters(alphabet="abc"), "the tokenizer is a WordLevel; choose a model with a byte-level BPE"),
        (byte_level(normalizer=normalizers.Lowercase()), "has the normalizer Lowercase, which to-gguf does not write"),
        (byte_level(split(r"\w+")), "which is none of gpt-2, smollm, qwen2, smaug-bpe, llama-bpe"),
        (byte_level(ignore_merges=True), "(ignore_merges=True), which is none of"),
        (stripping(), "the token '<mask>' has lstrip, which to-gguf does not write"),
        (between(), "and llama.cpp adds only bos and eos to"),
        (byte_level(more=40), "the token '<39>' has the id 307, and the model 300 embeddings"),
    ],
)
def test_a_tokenizer_that_is_not_written(tokenizer, message, run, tmp_path):
    save(tmp_path / "model", tokenizer=tokenizer)
    code, error = run(tmp_path / "model", "--out", tmp_path / "out.gguf")
    assert code == 1 and message in error and str(tmp_path / "model") in error
    assert not (tmp_path / "out.gguf").exists()
