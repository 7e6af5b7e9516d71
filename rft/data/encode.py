"""From rows to token ids: what the model reads before it answers, and supervised examples that begin with exactly that.

Text only; the context length is not checked here, because what an answer may add to it is not known here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase


class Encoder:
    """Turns rows into token ids.

    Args:
        tokenizer: supplied.
        template: "none": the prompt is the text as it stands, behind the tokenizer's begin token where it is one that
            the tokenizer itself would put there; "chat": the tokenizer's chat template, up to where the answer begins.
        system: system message in front of chats that have none, or null.

    Raises:
        ValueError: the tokenizer has no end token or no chat template, or a system message has no place.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: Literal["none", "chat"], system: str | None
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end token (eos_token): without one no answer can end; add it")
        if template == "chat" and tokenizer.chat_template is None:
            raise ValueError("data.template=chat: the tokenizer has no chat template; set data.template=none")
        if template == "none" and system is not None:
            raise ValueError(
                "data.system has no place in data.template=none; set data.template=chat or data.system=null"
            )
        self._tokenizer = tokenizer
        self._template = template
        self._system = system
        begin = tokenizer.bos_token_id
        begins = template == "none" and begin is not None and tokenizer("").input_ids[:1] == [begin]
        self._prefix: list[int] = [begin] if begins else []

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """What the model reads before it answers each row's `prompt`: a text, or chat messages `{role, content}`.

        Raises:
            ValueError: a prompt is empty, or not what the template takes; names the row's place in `rows`.
        """
        if not rows:
            return []
        encoded = self.encode([self._text(row["prompt"], number) for number, row in enumerate(rows)])
        prompts = [self._prefix + ids for ids in encoded]
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"the prompt of row {number} is empty: there is nothing to answer; take the row out")
        return prompts

    def prompt(self, row: Mapping[str, Any]) -> list[int]:
        """`prompts` of one row."""
        return self.prompts([row])[0]

    def example(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        """A supervised row: the ids of `prompt`, then the row's `response` and the end token.

        Prompt and response are tokenised apart, so that training sees the very prompt that sampling will see.

        Returns:
            T ids, and T flags that are True on the response and the end token.

        Raises:
            ValueError: the response is not a text, or as in `prompts`.
        """
        text = row["response"]
        if not isinstance(text, str):
            raise ValueError(
                f"a response is {type(text).__name__}, not text; name another field in columns.response of the data set"
            )
        prompt = self.prompt(row)
        response = [*self.encode([text])[0], self._tokenizer.eos_token_id]
        return prompt + response, [False] * len(prompt) + [True] * len(response)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of texts as they stand: no template, no begin token."""
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False).input_ids

    def _text(self, prompt: Any, number: int) -> str:
        if not isinstance(prompt, str | list):
            raise ValueError(
                f"the prompt of row {number} is {type(prompt).__name__}, not text or a list of chat messages; "
                f"name another field in columns.prompt of the data set"
            )
        if self._template == "none":
            if isinstance(prompt, str):
                return prompt
            raise ValueError(f"the prompt of row {number} is a list of chat messages; set data.template=chat")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system is not None and messages[:1] and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
