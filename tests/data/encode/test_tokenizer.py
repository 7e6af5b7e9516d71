"""Tokenizers of our own: what they do to text, and that they survive being saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, PretrainedConfig, PreTrainedTokenizerBase, Qwen3Config

from rft.data.encode.tokenizer import bpe, characters, pretrained
from rft.registry import Target

DATA = os.environ.get("RFT_GSM8K_DIR")
TEXT = "Weng earns $12 an hour.  é 漢字\n\n x = 3*4 = <<3*4=12>>12 .\n#### 1,234"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "train.jsonl"
    rows = [{"question": f"Weng earns ${n} an hour", "answer": f"She earned {n} dollars\n#### {n}"} for n in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def trained(file: str) -> PreTrainedTokenizerBase:
    return bpe(files=[file], fields=["question", "answer"], vocab_size=320)


def test_characters_are_tokens() -> None:
    tokenizer = characters(alphabet="01 =\na")
    ids = tokenizer("10 = a\n01").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["1", "0", " ", "=", " ", "a", "\n", "0", "1"]
    assert tokenizer.decode(ids) == "10 = a\n01"
    assert len(tokenizer) == 6 + 3
    assert tokenizer("").input_ids == []


def test_an_unknown_character_is_one_unknown_token() -> None:
    tokenizer = characters(alphabet="ab")
    ids = tokenizer("aX漢b").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "<unk>", "<unk>", "b"]


def test_a_character_listed_twice_counts_once() -> None:
    assert len(characters(alphabet="aab")) == 2 + 3


def test_end_and_padding_are_set_and_skipped(trained: PreTrainedTokenizerBase) -> None:
    for tokenizer in (characters(alphabet="ab"), trained):
        assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<eos>")
        ids = [*tokenizer("ab").input_ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def test_bpe_learns_words_and_leaves_digits_alone(trained: PreTrainedTokenizerBase) -> None:
    tokens = trained.tokenize("She earned 1234 dollars")
    assert tokens == ["She", "Ġearned", "Ġ", "1", "2", "3", "4", "Ġdollars"]
    assert len(trained) <= 320
    assert not [token for token in trained.get_vocab() if len(token) > 1 and any(c.isdigit() for c in token)]


def test_bpe_spells_any_text(trained: PreTrainedTokenizerBase) -> None:
    assert trained.decode(trained(TEXT).input_ids) == TEXT


@pytest.mark.slow
def test_bpe_is_the_same_in_every_process(file: str, trained: PreTrainedTokenizerBase) -> None:
    code = (
        "import sys; from rft.data.encode.tokenizer import bpe; "
        "t = bpe(files=[sys.argv[1]], fields=['question', 'answer'], vocab_size=320); "
        "sys.stdout.buffer.write(t.backend_tokenizer.to_str().encode())"
    )
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code, file], env=environment, capture_output=True, check=True)
    assert other.stdout.decode() == trained.backend_tokenizer.to_str()


@pytest.mark.parametrize("config", [None, Qwen3Config(), LlamaConfig()], ids=["alone", "qwen3", "llama"])
def test_saved_tokenizers_come_back_the_same(
    tmp_path: Path, trained: PreTrainedTokenizerBase, config: PretrainedConfig | None
) -> None:
    """Also beside a model: transformers may put its own class for the model's type in the place of ours."""
    for name, tokenizer in (("characters", characters(alphabet="0123456789 =\na")), ("bpe", trained)):
        folder = tmp_path / name
        if config is not None:
            config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for again in (AutoTokenizer.from_pretrained(folder), pretrained(path=str(folder))):
            ids = tokenizer(TEXT).input_ids
            assert again(TEXT).input_ids == ids
            assert again.decode(ids) == tokenizer.decode(ids)
            assert len(again) == len(tokenizer)
            assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_pretrained_pads_with_the_end_where_it_must(tmp_path: Path) -> None:
    tokenizer = characters(alphabet="ab")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token is None
    assert pretrained(path=str(tmp_path)).pad_token == "<eos>"


def test_bad_options_name_the_key(tmp_path: Path, file: str) -> None:
    with pytest.raises(ValueError, match=r"actor\.tokenizer\.alphabet is empty"):
        characters(alphabet="")
    with pytest.raises(ValueError, match=r"actor\.tokenizer\.vocab_size=257 .*at least 258"):
        bpe(files=[file], fields=["answer"], vocab_size=257)
    with pytest.raises(ValueError, match=r"actor\.tokenizer\.files\[1\]=.*no\.jsonl: there is no such file"):
        bpe(files=[file, str(tmp_path / "no.jsonl")], fields=["answer"], vocab_size=300)
    with pytest.raises(ValueError, match=r"line 1: no field 'answr'.*did you mean answer.*actor\.tokenizer\.fields"):
        bpe(files=[file], fields=["answr"], vocab_size=300)
    with pytest.raises(ValueError, match="hold no text"):
        bpe(files=[file], fields=[], vocab_size=300)
    with pytest.raises(ValueError, match=r"actor\.tokenizer\.path=.*cannot load"):
        pretrained(path=str(tmp_path / "no"))


def test_built_from_yaml(file: str) -> None:
    node = {"_target_": "rft.data.encode.tokenizer.bpe", "files": [file], "fields": ["answer"], "vocab_size": 300}
    assert len(Target(node, "actor.tokenizer").build()) <= 300
    with pytest.raises(ValueError, match=r"actor\.tokenizer\.vocab_size: expected whole number"):
        Target(node | {"vocab_size": "300"}, "actor.tokenizer")


@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason="RFT_GSM8K_DIR is not set")
def test_bpe_on_gsm8k() -> None:
    tokenizer = bpe(files=[f"{DATA}/train.jsonl"], fields=["question", "answer"], vocab_size=2048)
    assert len(tokenizer) == 2048
    with open(f"{DATA}/test.jsonl", encoding="utf-8") as lines:
        answers = [json.loads(line)["answer"] for line in lines]
    for answer, ids in zip(answers, tokenizer(answers).input_ids, strict=True):
        assert tokenizer.decode(ids) == answer
