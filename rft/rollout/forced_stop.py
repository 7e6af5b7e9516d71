"""Options of a forced stop, a phrase in an answer that is too long; see `rft.rollout.interruption`."""

from dataclasses import dataclass
from typing import Any

from rft.data.encode.encoder import Encoder
from rft.imports import import_part
from rft.ranges import OpenFraction

# A part, which a run with `algorithm.source.interruption` imports: its module and its class.
INTERRUPTION = ("rft.rollout.interruption", "Interruption")


@dataclass(frozen=True)
class ForcedStop:
    """Control of the length by a phrase in the middle of an answer (ScaleRL, 2510.13786).

    An answer that has not ended in time gets the phrase and continues to its end. Both parts and the phrase together
    have at most as many tokens as the answer may have: `rollout.max_new_tokens`, or less where fewer are left to a
    dialogue. The phrase does not train, because the engine did not sample it.

    Attributes:
        after: smallest and largest share of these tokens that an answer has before the phrase. The length is drawn
            uniformly for every answer; it is less where there would be no room for the phrase and one token more.
        phrase: the text that is inserted.
    """

    after: tuple[OpenFraction, OpenFraction]
    phrase: str

    def __post_init__(self) -> None:
        if self.after[0] > self.after[1]:
            raise ValueError(f"algorithm.source.interruption.after={list(self.after)}: put the smaller share first")
        if not self.phrase:
            raise ValueError("algorithm.source.interruption.phrase is empty: give the text that is inserted")

    def check(self, key: str, phrase: int, most: int, most_key: str) -> None:
        """Refuses a phrase that leaves no room for an answer.

        Args:
            key: the yaml key of the source.
            phrase: tokens of the phrase.
            most: cap on the tokens of a response.
            most_key: its yaml key.
        """
        if phrase + 2 > most:
            raise ValueError(
                f"{key}.interruption.phrase has {phrase} tokens, which with one before and one behind is more than "
                f"{most_key}={most}; shorten it, raise {most_key} or choose another algorithm/source"
            )

    def encode(self, encoder: Encoder) -> list[int]:
        """The tokens of the phrase."""
        return encoder.encode([self.phrase])[0]

    def with_encoder(self, encoder: Encoder) -> Any:
        """The `rft.rollout.interruption.Interruption` by this phrase."""
        return import_part(*INTERRUPTION, "algorithm.source.interruption")(self, self.encode(encoder))
