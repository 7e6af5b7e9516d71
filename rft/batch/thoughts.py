"""Thoughts: the marks around them, and the prompts that end inside of one.

Templates of models that always think end the prompt with the opening mark. The response then begins inside of a
thought: it has the closing mark alone. Without torch: workers of rewards import this module.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rft.batch.row_fields import PROMPT_OPENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The mark that closes a thought, by the one that opens it.
MARKS = {
    "<think>": "</think>",  # DeepSeek, Qwen, GLM, Nemotron, MiniMax, Kimi
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "[THINK]": "[/THINK]",  # Magistral
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
}
TAIL = 64  # tokens at the end of a prompt that hold a mark and the white space behind it


class PromptThoughts:
    """Finds the thoughts that prompts open.

    A mark whose closing mark is a special token of the tokenizer is left out: the texts of responses have no special
    tokens, so a reward could not see where the thought ends.

    Args:
        tokenizer: of the prompts.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._tokenizer = tokenizer
        self._marks = {start: end for start, end in MARKS.items() if end not in special.values()}
        no_turn = {*MARKS, *MARKS.values(), special.get(tokenizer.unk_token_id, "")}
        self._special = {number for number, text in special.items() if text not in no_turn}

    def opened(self, prompt: Sequence[int]) -> str | None:
        """The mark of the thought in which a prompt ends; None where it ends in none.

        A prompt ends in a thought if the mark is its last text, or, where an answer is continued, if the text behind
        the last special token, the beginning of the answer, opens a thought and does not close it. A mark that a
        message quotes opens none.

        Args:
            prompt: token ids.
        """
        size = len(prompt)
        start = next((place for place in range(size, 0, -1) if prompt[place - 1] in self._special), 0)
        turns = start > 1  # a single special token in front is the BOS token
        ids = list(prompt[start if turns else max(start, size - TAIL) :])
        text = str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)).rstrip()
        for opening, closing in self._marks.items():
            if text.endswith(opening) or (turns and text.rfind(opening) > text.rfind(closing)):
                return opening
        return None

    def entry(self, prompt: Sequence[int]) -> dict[str, str]:
        """The entry `PROMPT_OPENS` of the row of a prompt; empty where the prompt ends in no thought."""
        opened = self.opened(prompt)
        return {} if opened is None else {PROMPT_OPENS: opened}


def behind_thought(text: str, opening: str, closing: str) -> str | None:
    """The text behind the last thought; of a text whose last thought does not end, what stands before this thought.

    Returns:
        None where a thought does not end, and only white space is before it: there is no answer.
    """
    _, ended, behind = text.rpartition(closing)
    rest = behind.lstrip() if ended else text
    before, opened, _ = rest.partition(opening)
    if not opened:
        return rest
    return before if before.strip() else None
