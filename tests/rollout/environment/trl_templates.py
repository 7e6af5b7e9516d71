"""The chat templates that TRL ships, each with a small tokenizer of its special tokens. TRL itself is not imported."""

import sys
from functools import cache
from pathlib import Path

import pytest

from rft.data.encode.encoder import Encoder

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from chat_page import NAMES, tokenizer

NO_TEXT = {"idefics3", "idefics3_training", "smolvlm", "smolvlm_training", "llava_next", "llava_next_training"}
needs_trl = pytest.mark.skipif(len(NAMES) != 72, reason="trl 1.16 is not installed (.ci/run downloads it for these)")


@cache
def encoder(name: str) -> Encoder:
    """An encoder with a template of TRL."""
    return Encoder(tokenizer(name), "chat", None)
