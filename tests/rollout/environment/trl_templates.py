"""The chat templates that TRL ships, each with a small tokenizer of its special tokens. TRL itself is not imported."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rft.data.encode.encoder import Encoder
from tests.data.encode.test_masks import CORPUS

SPEC = find_spec("trl")
FOLDER = Path(next(iter(SPEC.submodule_search_locations or []))) / "chat_templates" if SPEC else Path("/nowhere")
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
NO_TEXT = {"idefics3", "idefics3_training", "smolvlm", "smolvlm_training", "llava_next", "llava_next_training"}
needs_trl = pytest.mark.skipif(len(NAMES) != 72, reason="trl 1.16 is not installed (.ci/run downloads it for these)")
TOKENS = r"<[|｜][^|｜<>]+[|｜]>|</?[a-z_0-9]+>|<[A-Z_|]+>|\[/?[A-Z_]+\]|<[a-z_]+\|>|<\|[a-z_\"]+>"  # noqa: RUF001


@cache
def _words() -> str:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return made.to_str()


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a template of TRL; what looks like a special token in the template is one."""
    template = (FOLDER / f"{name}.jinja").read_text()
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_words()), bos_token="<bos>", eos_token="<eos>")
    special = sorted(set(re.findall(TOKENS, template)))
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made.chat_template = template
    return made


@cache
def encoder(name: str) -> Encoder:
    """An encoder with a template of TRL."""
    return Encoder(tokenizer(name), "chat", None)
