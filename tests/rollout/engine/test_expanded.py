"""An engine that expands a prompt to other tokens than the trainer reads is refused with the place and both tokens."""

import pytest

from rft.rollout.engine.expanded import OtherPrompt, check_expanded
from tests.rollout.word_models import word_tokenizer


def test_the_first_difference_is_named():
    tokenizer = word_tokenizer(64)
    check_expanded(0, [5, 6, 7], [5, 6, 7], tokenizer)
    words = {token: tokenizer.decode([token]) for token in (8, 9)}
    with pytest.raises(OtherPrompt) as found:
        check_expanded(3, [5, 6, 8, 7], [5, 6, 9, 9, 7], tokenizer)
    for part in (
        "prompt 3:",
        "position 2",
        f"{words[8]!r} (8) for the trainer",
        f"{words[9]!r} (9)",
        "(4 and 5 tokens",
    ):
        assert part in str(found.value)
    assert "set rollout=hf" in str(found.value)
    with pytest.raises(OtherPrompt, match=r"position 2, .*the end of the prompt for the engine"):
        check_expanded(0, [5, 6, 8], [5, 6], tokenizer)
