"""Tokenizes a text that continues another one, without the blank that some tokenizers write before a text.

Tokenizers in the manner of SentencePiece (Llama 2, Mistral, T5) turn `Yes` into `▁Yes`: a text begins with a word.
Behind the tokens of `2+2=` that would be a blank that no text has. Such a tokenizer gets the text behind a neutral one,
whose tokens are cut off.
"""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from rft.batch.encoded import EncodedText
from rft.data.encode.processor import RichText

BLANKS = ("▁", "Ġ")  # how tokens of Metaspace and of byte-level tokenizers begin that stand for a blank
NEUTRAL = ("\n", "=", "a", "0")  # a tokenizer may drop one of them, or merge it with the text


class Continuation:
    """Tokenizes texts that continue another one.

    Args:
        tokenizer: of the run. One that writes no blank before a text gets the texts as they are.
        tokenize: the tokens of texts that stand alone.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tokenize: Callable[[Sequence[RichText]], list[EncodedText]]
    ) -> None:
        self._tokenize = tokenize
        first = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False).input_ids[:1])
        self._writes_blank = any(token.startswith(BLANKS) for token in first)
        self._added = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}

    def __call__(self, texts: Sequence[RichText], behind: int | None = None) -> list[EncodedText]:
        """The tokens of each text.

        Args:
            behind: the token before the text, behind which the tokenizer may begin a word: an added one. None, or
                another token: the text continues a text.
        """
        if not self._writes_blank:
            return self._tokenize(texts)
        before = NEUTRAL if behind not in self._added else (self._added[behind],)
        heads = self._tokenize([RichText(text) for text in before])
        return [self._cut(rich, list(zip(before, heads, strict=True))) for rich in texts]

    def _cut(self, rich: RichText, neutrals: Sequence[tuple[str, EncodedText]]) -> EncodedText:
        """The tokens of a text behind the first of some texts that keeps its own tokens; alone if none does."""
        for before, head in neutrals:
            [whole] = self._tokenize([RichText(before + rich.text, rich.media)])
            if head and whole[: len(head)] == head:
                return whole.behind(len(head))
        return self._tokenize([rich])[0]
