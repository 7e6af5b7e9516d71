"""What happens to a prompt that has more tokens than `data.max_prompt_tokens`."""

from dataclasses import dataclass
from typing import Literal, TypeVar

from rft.batch.encoded import EncodedText

Truncation = Literal["drop", "left", "right", "middle", "error"]
Item = TypeVar("Item")


@dataclass(frozen=True)
class PromptLimit:
    """The maximal number of tokens of a prompt, and what happens to longer ones, as verl's `data.truncation` names it.

    Attributes:
        most: `data.max_prompt_tokens`.
        truncation: left, right and middle remove tokens at the beginning, at the end or between them; drop removes the
            row from its set before the encoder sees it; error makes the encoder raise.
    """

    most: int
    truncation: Truncation

    @property
    def cuts(self) -> bool:
        """Whether longer prompts are cut."""
        return self.truncation in ("left", "right", "middle")

    def refuses(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens is an error."""
        return self.truncation == "error" and tokens > self.most

    def cut(self, tokens: list[Item]) -> list[Item]:
        """The prompt, or what is left of a longer one: `most` items. Of an odd `most` the end keeps one more."""
        most = self.most
        if not self.cuts or len(tokens) <= most:
            return tokens
        first = {"left": 0, "right": most, "middle": most // 2}[self.truncation]  # items that stay at the beginning
        return tokens[:first] + tokens[len(tokens) - (most - first) :]

    def cut_prompt(self, prompt: EncodedText) -> EncodedText:
        """`cut` of a prompt and its columns. Raises ValueError where it has media."""
        if not self.cuts or len(prompt) <= self.most:
            return prompt
        if prompt.media is not None:
            raise ValueError(
                f"data.truncation={self.truncation}: a prompt with media has {len(prompt)} tokens, over "
                f"data.max_prompt_tokens={self.most}, and cannot be cut; set data.truncation=drop"
            )
        return EncodedText(self.cut(prompt), {name: self.cut(prompt.column(name)) for name in prompt.columns})

    def refusal(self, tokens: int) -> str:
        """Why a prompt of so many tokens is an error, and the cure."""
        return (
            f"{tokens} tokens, over data.max_prompt_tokens={self.most}, which data.truncation=error refuses; remove "
            "the row, raise data.max_prompt_tokens, or set data.truncation to drop, left, right or middle"
        )
