"""Counts the tokens of rows, on all ranks together, and caches the counts.

The cache key is a hash of everything that the counts depend on: the rows as they reach the tokenizer, the size and time
of the files of media, the tokenizer with its template, the options, the code of this project that encodes rows, and the
versions of the packages it calls.
"""

import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import jinja2
import numpy as np
import tokenizers
import torch
import transformers
from numpy.typing import NDArray

from rft.conditions import fields_of
from rft.data.base import GivenTexts, SourceContext
from rft.data.encode import base, fates, parts, tokenizer, truncation
from rft.data.encode import encoder as encode
from rft.data.encode.encoder import Encoder
from rft.data.encode.fates import FATES
from rft.data.encode.truncation import PromptLimit, TextLimit, TextTokens
from rft.data.fingerprint import digest, recall, remember
from rft.data.processes import CHUNK, in_chunks
from rft.data.rows.base import WeightedRows
from rft.data.rows.lazy import Row, Rows, located, place, subset
from rft.distributed import SINGLE_PROCESS, World

VERSIONS = [package.__version__ for package in (jinja2, tokenizers, transformers)]
Item = TypeVar("Item")
Counts = NDArray[np.int32]
Count = Callable[[range], list[tuple[int, ...]]]  # the counts of the rows of these numbers


class Lengths:
    """Counts the tokens of rows. Its methods are collectives; every rank gets the counts of all rows.

    Args:
        world: the ranks that share the work.
        encoder: encodes the rows.
        folder: the folder of the cache, or None.
    """

    def __init__(self, world: World, encoder: Encoder, folder: str | None) -> None:
        self._world = world
        self._encoder = encoder
        self._folder = None if folder is None else Path(folder).expanduser()

    def prompts(self, rows: Rows) -> Counts:
        """Tokens of each row's prompt, after a cut by `data.truncation`; raises what `whole_prompts` raises."""
        counts, limit = self.whole_prompts(rows), self._encoder.limit
        return counts if limit is None or not limit.cuts else np.minimum(counts, limit.most)

    def whole_prompts(self, rows: Rows) -> Counts:
        """Tokens of each row's prompt, before `data.truncation` cuts it: (N,).

        Raises:
            ValueError: a prompt cannot be encoded; names its row.
        """

        def count(numbers: range) -> list[tuple[int, ...]]:
            return [(len(prompt),) for prompt in self._encoder.whole_prompts(subset(rows, numbers))]

        def read(row: Row) -> Row:
            return {name: row.get(name) for name in ("prompt", "tools")}

        return self._known(rows, read, "prompts", count, 1)[:, 0]

    def texts(self, given: GivenTexts, rows: Rows) -> TextTokens:
        """The tokens of each row's given texts, before `data.overlong` cuts them, and the answers in them.

        Raises:
            ValueError: a row cannot be encoded; names it.
        """
        encoder = copy(self._encoder)
        encoder.answers = answered = Counter[str]()
        texts = given.build(SourceContext(SINGLE_PROCESS, 0, encoder, rows, 1, (), False)).texts

        def count(numbers: range) -> list[tuple[int, ...]]:
            counted = []
            for number in numbers:
                with located(rows, number):
                    tokens = count_tokens(texts(number, rows[number]), encoder)
                counted.append((*tokens, *(answered.pop(fate, 0) for fate in FATES)))
            return counted

        made_of = (_code(given.source), fields_of(given.options))
        known = self._known(rows, lambda row: row, made_of, count, 3 + len(FATES))
        return TextTokens(known[:, 0], known[:, 1], known[:, 2], known[:, 3:])

    def _known(self, rows: Rows, read: Callable[[Row], Row], made_of: Any, count: Count, size: int) -> Counts:
        """The cached counts of the rows, (N, size); if there are none, all ranks count a share of the rows each."""
        world, folder = self._world, self._folder
        if folder is None:
            return self._counted(count, len(rows), size)
        name = self._name(rows, read, made_of)
        known: Counts | None = world.gather(recall(folder, name) if world.rank == 0 else None)[0]
        if known is not None:
            return known.reshape(-1, size)
        counted = self._counted(count, len(rows), size)
        if world.rank == 0:
            try:
                remember(folder, name, counted)
            except OSError as error:
                logging.getLogger(__name__).warning("cache=%s: rows are counted each time (%s)", folder, error)
        return counted

    def _counted(self, count: Count, total: int, size: int) -> Counts:
        def share(rank: int, ranks: int) -> Counts:
            own = range(rank, total, ranks)

            def counted(part: range) -> Counts:
                return np.array(count(own[part.start : part.stop]), "i4")

            return np.concatenate([np.empty((0, size), "i4"), *in_chunks("counted rows", len(own), counted)])

        try:
            local_counts = share(self._world.rank, self._world.size)
        except ValueError:
            local_counts = None  # this rank still joins the collective
        shares = self._world.gather(local_counts)
        if any(found is None for found in shares):
            return share(0, 1)  # where a rank failed, every rank counts all rows and raises the error of the first one
        counts = np.empty((total, size), "i4")
        for rank, found in enumerate(shares):
            counts[rank :: len(shares)] = found
        return counts

    def _name(self, rows: Rows, read: Callable[[Row], Row], made_of: Any) -> bytes:
        def content(row: Row) -> Row:
            return read(row) if self._encoder.processor is None else parts.map_media(read(row), _state)

        starts = range(0, len(rows), CHUNK)[self._world.rank :: self._world.size]

        def hashed(part: range) -> bytes:
            start = starts[part.start // CHUNK]
            return digest([content(row) for row in rows[start : start + CHUNK]])

        digests = in_chunks("hashed rows", len(starts) * CHUNK, hashed)
        return digest((made_of, VERSIONS, self._encoding, _interleave(self._world.gather(digests))))

    @cached_property
    def _encoding(self) -> list[Any]:
        """Everything that the tokens of a row depend on, except the row."""
        with TemporaryDirectory() as folder:
            self._encoder.save(Path(folder))
            files = [(path.name, path.read_bytes()) for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        used, chat = self._encoder.processor, self._encoder.chat
        modules = [encode, base, fates, parts, tokenizer, truncation]
        chosen = [one for one in (chat, used) if one is not None]
        modules += [module for one in chosen for module in one.modules]
        code = [Path(inspect.getfile(module)).read_bytes() for module in modules]
        code += [file for one in chosen for file in _code(type(one))]
        sent = None if used is None else (used.keeps_raw, used.sends_padded)
        return [files, code, self._encoder.made_of, sent]


def _state(kind: str, value: Any) -> Any:
    """The path of a medium with the size and time of its file; another value as it is."""
    if isinstance(value, list):
        return [_state(kind, frame) for frame in value]
    if not isinstance(value, str) or not os.path.isfile(value):
        return value
    state = os.stat(value)
    return value, state.st_size, state.st_mtime_ns


def _interleave(shares: Sequence[Sequence[Item]]) -> list[Item]:
    """The items of all ranks in one list: item i comes from rank i modulo the number of ranks."""
    items: list[Any] = [None] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        items[rank :: len(shares)] = share
    return items


def _code(kind: type) -> list[bytes]:
    """The source files of a class and of its base classes."""
    bases = [base for base in kind.__mro__ if base.__module__ not in ("builtins", "abc")]
    return [Path(inspect.getfile(base)).read_bytes() for base in bases]


def count_tokens(texts: Sequence[Row], encoder: Encoder) -> tuple[int, int, int]:
    """Of the texts of a row of the data set: the tokens, how many a cut must leave, and whether they are equal; see
    `TextTokens`.

    Args:
        texts: as `GivenSource.texts` returns them.
    """
    facts, counted = encoder.media_facts, []
    for text in texts:
        ids, trains = text["tokens"]["input_ids"].numpy(), text["response_mask"].numpy()  # (T,), (T,)
        least = int(trains.argmax()) + 1 if trains.any() else len(ids)
        if facts is not None:
            least = max([least, *np.flatnonzero(np.isin(ids, facts.placeholders))[-1:] + 1])
        counted.append((len(ids), least))
    tokens, least = map(max, zip(*counted, strict=True))
    return tokens, least, int("chosen" in texts[0] and _equal(*texts))


def _equal(chosen: Row, rejected: Row) -> bool:
    """Whether the two rows of a pair have the same tokens and media."""
    if not torch.equal(chosen["tokens"]["input_ids"], rejected["tokens"]["input_ids"]):
        return False
    first, second = (text.get("media") or {} for text in (chosen, rejected))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def limit_texts(
    rows: Rows, texts: TextTokens, limit: TextLimit, key: str, log: Callable[[str], None]
) -> tuple[Rows, Counts]:
    """The rows that stay in a set, and the tokens that each of them then has. Logs what happens to long rows.

    Args:
        texts: the tokens of each row.
        key: the yaml key of the rows.
        log: shows a message to the user.

    Raises:
        ValueError: overlong=error and a row is too long; or no row is left, or none of a mixture's part.
    """
    counts, most = texts.tokens, int(texts.tokens.max())
    if most <= limit.most:
        return rows, counts
    if limit.overlong == "error":
        raise ValueError(f"{key}: {place(rows, int(counts.argmax()))}: the row has {limit.refusal(most)}")
    over, kept = int((counts > limit.most).sum()), np.flatnonzero(limit.keeps(counts, texts.least))
    message = f"{key}: {over} of {len(rows)} rows have more tokens than {limit.name}; the longest has {most}"
    if not len(kept):
        raise ValueError(f"{message}, and no row is left with data.overlong={limit.overlong}; raise the limit")
    dropped = len(rows) - len(kept)
    if limit.overlong == "truncate" and over > dropped:
        message += f". Cut to {limit.most} tokens: {over - dropped}"
    if dropped:
        why = f", since {limit.uncuttable}" if limit.overlong == "truncate" else ""
        message += f". Dropped{why}: {dropped}"
    log(f"{message} (data.overlong={limit.overlong})")
    left = _chosen(rows, kept, key, limit.name) if dropped else rows
    return left, np.minimum(counts[kept], limit.most)


def limit_prompts(
    rows: Rows, counts: Counts, limit: PromptLimit | None, key: str, log: Callable[[str], None]
) -> tuple[Rows, Counts]:
    """The rows that stay in a set, and the tokens that their prompts then have. Logs what happens to long prompts.

    Args:
        counts: tokens of each row's prompt, with the template.
        limit: None keeps all rows.
        key: the yaml key of the rows.
        log: shows a message to the user.

    Raises:
        ValueError: truncation=error and a prompt is too long; or drop and no row is left, or none of a mixture's part.
    """
    if limit is None or (longest := int(counts.max())) <= limit.most:
        return rows, counts
    most, short = limit.most, np.flatnonzero(counts <= limit.most)
    if limit.refuses(longest):
        raise ValueError(f"{key}: {place(rows, int(counts.argmax()))}: the prompt has {limit.refusal(longest)}")
    message = (
        f"{key}: {len(rows) - len(short)} of {len(rows)} prompts have more tokens than data.max_prompt_tokens={most}; "
        f"the longest has {longest}"
    )
    if limit.cuts:
        log(f"{message}. They are cut to {most} tokens (data.truncation={limit.truncation})")
        return rows, np.minimum(counts, most)
    if not len(short):
        raise ValueError(f"{message}, the shortest {counts.min()}, and no row is left; raise data.max_prompt_tokens")
    log(f"{message}. They are dropped")
    return _chosen(rows, short, key, f"data.max_prompt_tokens={most}"), counts[short]


def _chosen(rows: Rows, numbers: NDArray[np.int64], key: str, limit: str) -> Rows:
    """The rows of these indices; arguments and errors are those of `WeightedRows.kept`."""
    return rows.kept(numbers, key, limit) if isinstance(rows, WeightedRows) else subset(rows, numbers)
