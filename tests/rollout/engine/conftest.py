"""The tokenizer of the models in word_models.py."""

import pytest

from tests.rollout.word_models import VOCABULARY, word_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(VOCABULARY)
