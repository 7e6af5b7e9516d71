"""The chat templates that TRL ships: what its own masks train, what transformers continues, and where scores are read."""

from typing import Any

import pytest

from rft.actor.model import with_end_token
from rft.data.encode.encoder import Encoder
from rft.data.encode.templates import Messages
from tests.data.encode.test_masks import CALLING, TWO, said, trained, user
from tests.rollout.environment import trl_templates as trl

pytestmark = trl.needs_trl
TRAINING = [name for name in trl.NAMES if name.endswith("_training")]
ASKED = [user("What is 2+2?")]


def rendered(name: str, messages: Messages, **options: Any) -> Any:
    """What transformers makes of messages; templates that take parts alone get them."""
    if name in trl.NO_TEXT:
        messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    return trl.tokenizer(name).apply_chat_template(messages, **options)


@pytest.mark.parametrize("name", trl.NAMES)
def test_a_begun_answer_is_continued_as_transformers_continues_it(name):
    begun = [*ASKED, said("It is")]
    encoder = Encoder(trl.tokenizer(name), "chat", None)
    text = rendered(name, begun, continue_final_message=True, tokenize=False)
    assert encoder.decode(encoder.prompt({"prompt": begun})) == text
