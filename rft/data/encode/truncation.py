"""What happens to a prompt that has more tokens than `data.max_prompt_tokens`."""

from dataclasses import dataclass
from typing import Literal, TypeVar

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

    def refusal(self, tokens: int) -> str:
        """Why a prompt of so many tokens is an error, and the cure."""
        return (
            f"{tokens} tokens, over data.max_prompt_tokens={self.most}, which data.truncation=error refuses; remove "
            "the row, raise data.max_prompt_tokens, or set data.truncation to drop, left, right or middle"
        )
