"""What happens to a prompt of more tokens than `data.max_prompt_tokens`, and to a given text of more than its limit."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rft.batch.encoded import EncodedText

Truncation = Literal["drop", "left", "right", "middle", "error"]
Overlong = Literal["error", "drop", "truncate"]
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


class TextTokens(NamedTuple):
    """The tokens of the given text of each of N rows, prompt and answer together; of several texts of a row the largest
    numbers.

    Attributes:
        tokens: (N,) their number.
        least: (N,) how many a cut must leave: one that trains, and all tokens of media.
        equal: (N,) 1 where they are the two responses of a pair, and are the same; otherwise 0.
        answers: (N, F) answers of the assistant, by what becomes of them; see `fates.FATES`.
    """

    tokens: NDArray[np.int32]
    least: NDArray[np.int32]
    equal: NDArray[np.int32]
    answers: NDArray[np.int32]


@dataclass(frozen=True)
class TextLimit:
    """The maximal number of tokens of a given text, and what happens to longer ones.

    Attributes:
        most: `data.max_tokens`, or the model's context.
        overlong: `data.overlong`: drop removes the row from its set before the encoder sees it, truncate makes the
            encoder cut the end, error makes it raise.
        name: of `most` in messages, such as "data.max_tokens=512".
        media: ids of the tokens that stand for media or enclose them; none is cut.
    """

    most: int
    overlong: Overlong
    name: str
    media: frozenset[int]

    uncuttable: ClassVar[str] = "a cut would leave no token that trains, or not all media"

    def keeps(self, tokens: ArrayLike, least: ArrayLike) -> NDArray[np.bool_]:
        """Whether each row trains, whole or cut.

        Args:
            tokens, least: numbers or arrays, as of `TextTokens`.
        """
        return np.less_equal(least if self.overlong == "truncate" else tokens, self.most)

    def cut(self, text: EncodedText, overlong: Overlong) -> EncodedText:
        """The text, or the first `most` tokens of a longer one.

        Args:
            overlong: takes the place of the attribute.

        Raises:
            ValueError: a longer text is not to be cut, or has media behind the cut.
        """
        if len(text) <= self.most:
            return text
        if overlong != "truncate":
            raise ValueError(f"the row has {self.refusal(len(text))}")
        if not self.media.isdisjoint(text[self.most :]):
            raise ValueError(
                f"the row has {len(text)} tokens, over {self.name}, and media behind the first {self.most}, which "
                "cannot be cut; remove the row, or set data.overlong=drop"
            )
        return text.part(0, self.most)

    def refusal(self, tokens: int) -> str:
        """Why a text of so many tokens is an error, and the cures."""
        return (
            f"{tokens} tokens, over {self.name}; remove it, or set data.overlong=drop, which leaves such rows out, or "
            "data.overlong=truncate, which cuts their end"
        )
