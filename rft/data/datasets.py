"""Tokenizer and rows of a run, which are loaded before the model, and the checks of their lengths against it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from rft.data.base import GivenTexts
from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Lengths
from rft.data.encode.limits import check_lengths, fit_prompts, fit_texts
from rft.data.encode.truncation import TextLimit
from rft.data.fingerprint import fingerprint
from rft.data.rows.base import StreamedRows
from rft.data.rows.lazy import Rows
from rft.imports import import_part


@dataclass
class Datasets:
    """The tokenizer and the rows of a run.

    Attributes:
        encoder: turns rows into token ids.
        train: the rows to train on; of a stream, the first ones.
        held_out: the held-out sets by name.
        lengths: counts the tokens of rows.
        stream: the stream of the rows to train on, or None.
        canary: the canary tasks; empty if there are none.
        longest_text: tokens of the longest given text of `train` in the last stage; None if it has none.
        messages: notes for the user, collected while the rows are read.
    """

    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    train: Rows
    held_out: dict[str, Rows]
    lengths: Lengths
    stream: StreamedRows | None = None
    canary: Rows = ()
    longest_text: int | None = None
    messages: list[str] = field(default_factory=list)

    def rows(self, buffer: int | None, given: GivenTexts | None, log: Callable[[str], None]) -> Rows:
        """The rows that a source of batches draws from: `train`, or the opened stream.

        Args:
            buffer: `data.streaming`.
            given: the given texts of the source, or None.
            log: shows a message to the user while a stream is read.
        """
        if self.stream is None:
            return self.train
        assert buffer is not None
        filters = import_part("rft.data.encode.stream_limits", "stream_filters", f"data.streaming={buffer}")
        return self.stream.open(buffer, filters(self.encoder, given, self.stream), log)

    def fingerprints(self) -> dict[str, str]:
        """A hash of each data set, by its yaml key; of a stream that of its first rows."""
        sets = {"data.train": self.train} | {f"data.eval.{name}": rows for name, rows in self.held_out.items()}
        sets |= {"reward.canary.path": self.canary} if self.canary else {}
        return {key: fingerprint(rows) for key, rows in sets.items()}

    def fit_prompts(self, context: int, new_tokens: int | None) -> None:
        """Applies `data.truncation` to the rows to train on.

        Args:
            context: most tokens of a text that the model reads.
            new_tokens: most tokens of an answer; None if the engine samples none.

        Raises:
            ValueError: a prompt is too long, or leaves no room for an answer; names the row.
        """
        log = self.messages.append
        self.train, counts = fit_prompts("data.train", self.train, self.lengths, self.encoder.limit, log)
        if new_tokens is not None:
            check_lengths("data.train", counts, context, new_tokens)

    def fit_texts(self, given: GivenTexts, limit: TextLimit) -> None:
        """Applies `data.overlong` to the rows to train on. Raises a ValueError as `fit_texts`."""
        log = (lambda message: None) if self.stream is not None else self.messages.append
        self.train, counts = fit_texts("data.train", self.train, self.lengths, limit, given, log)
        self.longest_text = int(counts.max())
