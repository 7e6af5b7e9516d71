"""Characters for which a tokenizer has no token: to the model, texts that differ in them alone are equal."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rft.data.encode.parts import SHOWN


class UnknownCharacters:
    """Finds them in texts by the unknown token, which stands for all of them.

    Args:
        tokenizer: of the texts. One whose unknown token ends or pads texts, too, as of byte-level BPE, has a token for
            every character.
        scored: a score is trained on texts, and no answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, scored: bool = False) -> None:
        self._scored = scored
        unknown = tokenizer.unk_token_id
        others = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        self._unknown = None if unknown in others else unknown
        self._tokenizer = tokenizer
        self._said = False

    def warn(self, text: str, ids: Sequence[int], where: str) -> None:
        """Logs the first character that has no token, once.

        Args:
            text: with the tokens `ids`.
            where: the place of the row.
        """
        if not self._said and self._unknown in ids and (shown := self._first([text])):
            self._said = True
            logging.getLogger(__name__).warning(
                "%s: the tokenizer has no token for %s, which becomes %s, so texts that differ in such characters "
                "alone are equal; other rows with such characters are not named",
                where, shown, self._tokenizer.unk_token,
            )  # fmt: skip

    def check(self, row: Mapping[str, Any], ids: Sequence[int], weights: Sequence[float]) -> None:
        """Refuses an answer with such a character, and logs one that does not train, as `warn`.

        Args:
            row: with the fields `prompt` and `response`.
            ids: T tokens.
            weights: T weights, 0 where a token does not train.

        Raises:
            ValueError: names the character and the cure.
        """
        if self._unknown not in ids:
            return
        prompt, response = row.get("prompt"), row["response"]
        trains = not self._scored and any(
            weight and token == self._unknown for token, weight in zip(ids, weights, strict=True)
        )
        if trains and (shown := self._first(_texts([response, prompt]))):
            raise ValueError(
                f"the tokenizer has no token for {shown} of an answer, which would train {self._tokenizer.unk_token}; "
                "remove the row, or choose a tokenizer that has the character"
            )
        text = "".join(_texts([prompt, response]))
        self.warn(text, ids, f"the row that begins {text[:SHOWN]!r}")

    def _first(self, texts: Iterable[str]) -> str | None:
        """The first character without a token, as messages show it; None where the template alone has such."""
        text = "".join(texts)
        for special in self._tokenizer.all_special_tokens:  # the unknown token itself may stand in a text
            text = text.replace(special, "")
        characters = list(dict.fromkeys(text))
        tokens = self._tokenizer(characters, add_special_tokens=False).input_ids if characters else []
        found = (one for one, ids in zip(characters, tokens, strict=True) if self._unknown in ids)
        return next((f"{one!r} (U+{ord(one):04X})" for one in found), None)


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value, at every depth, but for the roles of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from () if name == "role" else _texts(item)
