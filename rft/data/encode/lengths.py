"""Counts the tokens of rows, on all ranks together, and caches the counts.

The cache key is a hash of everything that the counts depend on: the rows as they reach the tokenizer, the size and time
of the files of media, the tokenizer with its template, the options, the code of this project that encodes rows, and the
versions of the packages it calls.
"""

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import jinja2
import tokenizers
import transformers

from rft.batch.columns import lengths
from rft.data.base import GivenTexts, SourceContext
from rft.data.encode import continuation, masks, parts, processor, templates, truncation
from rft.data.encode import encoder as encode
from rft.data.encode.cache import digest, recall, remember
from rft.data.encode.encoder import Encoder
from rft.data.encode.media import audio
from rft.data.encode.media import files as media_files
from rft.data.encode.truncation import PromptLimit
from rft.data.rows.lazy import Row, Rows, place, subset
from rft.data.rows.mixture import Mixed
from rft.distributed import SINGLE_PROCESS, World

CHUNK = 1024  # rows that one rank hashes at once
VERSIONS = [package.__version__ for package in (jinja2, tokenizers, transformers)]
Item = TypeVar("Item")
Counts = tuple[list[int], list[int]]  # of each row; and sums over the rows of a rank, or of all ranks


class Examples(NamedTuple):
    """Facts of given texts.

    Attributes:
        tokens: of each text.
        answers: of the assistant in the texts by what becomes of them, see `masks.explain`.
    """

    tokens: list[int]
    answers: dict[str, int]


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

    def prompts(self, rows: Rows) -> list[int]:
        """Tokens of each row's prompt, after a cut by `data.truncation`; raises what `whole_prompts` raises."""
        counts, limit = self.whole_prompts(rows), self._encoder.limit
        return counts if limit is None or not limit.cuts else [min(count, limit.most) for count in counts]

    def whole_prompts(self, rows: Rows) -> list[int]:
        """Tokens of each row's prompt, before `data.truncation` cuts it.

        Raises:
            ValueError: a prompt cannot be encoded; names its row.
        """

        def count(world: World) -> Counts:
            local_rows = subset(rows, range(world.rank, len(rows), world.size))
            return [len(prompt) for prompt in self._encoder.whole_prompts(local_rows)], []

        return self._known(rows, lambda row: {name: row.get(name) for name in ("prompt", "tools")}, "prompts", count)[0]

    def examples(
        self, given: GivenTexts, rows: Rows, prompts: int, *, seed: int, columns: tuple[str, ...], shuffle: bool
    ) -> Examples:
        """Tokens of each row of the batches of an epoch, and what becomes of the answers in them.

        Args:
            rows, prompts, seed, columns, shuffle: see `SourceContext`.

        Raises:
            ValueError: a row cannot be encoded.
        """

        def count(world: World) -> Counts:
            context = SourceContext(world, seed, encoder, rows, prompts, columns, shuffle)
            before = dict(encoder.answers)
            tokens = [length for batch in given.epoch(context) for length in lengths(batch).tolist()]
            return tokens, [encoder.answers[name] - before.get(name, 0) for name in masks.FATES]

        encoder = self._encoder
        order = {"seed": seed, "columns": columns, "shuffle": shuffle}
        made_of = (_code(given.source), dict(given.options), prompts, order)
        tokens, answers = self._known(rows, lambda row: row, made_of, count)
        return Examples(tokens, dict(zip(masks.FATES, answers, strict=True)))

    def _known(self, rows: Rows, read: Callable[[Row], Row], made_of: Any, count: Callable[[World], Counts]) -> Counts:
        """The cached counts of these rows; if there are none, all ranks count a share of the rows each."""
        world, folder = self._world, self._folder
        if folder is None:
            return self._counted(count)
        name = self._name(rows, read, made_of)
        known: list[int] | None = world.gather(recall(folder, name) if world.rank == 0 else None)[0]
        if known is None:
            tokens, sums = self._counted(count)
            known = [len(sums), *sums, *tokens]
            if world.rank == 0:
                try:
                    remember(folder, name, known)
                except OSError as error:
                    logging.getLogger(__name__).warning("cache=%s: rows are counted each time (%s)", folder, error)
        return known[1 + known[0] :], known[1 : 1 + known[0]]

    def _counted(self, count: Callable[[World], Counts]) -> Counts:
        try:
            local_counts = count(self._world)
        except ValueError:
            local_counts = None  # this rank still joins the collective
        shares = self._world.gather(local_counts)
        if None in shares:  # every rank counts all rows alone and raises the error with the number of the row
            return count(SINGLE_PROCESS)
        tokens, sums = zip(*shares, strict=True)
        return _interleave(tokens), [sum(each) for each in zip(*sums, strict=True)]

    def _name(self, rows: Rows, read: Callable[[Row], Row], made_of: Any) -> bytes:
        def content(row: Row) -> Row:
            return read(row) if self._encoder.processor is None else parts.map_media(read(row), _state)

        starts = range(0, len(rows), CHUNK)[self._world.rank :: self._world.size]
        digests = [digest([content(row) for row in rows[start : start + CHUNK]]) for start in starts]
        return digest((made_of, VERSIONS, self._encoding, _interleave(self._world.gather(digests))))

    @cached_property
    def _encoding(self) -> list[Any]:
        """Everything that the tokens of a row depend on, except the row."""
        with TemporaryDirectory() as folder:
            self._encoder.save(Path(folder))
            files = [(path.name, path.read_bytes()) for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        modules = (encode, continuation, masks, audio, media_files, parts, processor, templates, truncation)
        code = [Path(inspect.getfile(module)).read_bytes() for module in modules]
        used = self._encoder.processor
        sent = None if used is None else (used.keeps_raw, used.sends_padded)
        return [files, code, self._encoder.made_of, sent]


def _state(kind: str, value: Any) -> Any:
    """The path of a medium with the size and time of its file; another value as it is."""
    if isinstance(value, list):
        return [_state(kind, frame) for frame in value]
    if not isinstance(value, str) or not os.path.isfile(value):
        return value
    found = os.stat(value)
    return value, found.st_size, found.st_mtime_ns


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


def limit_prompts(
    rows: Rows, counts: list[int], limit: PromptLimit | None, key: str, log: Callable[[str], None]
) -> tuple[Rows, list[int]]:
    """The rows that stay in a set, and the tokens that their prompts then have. Logs what happens to long prompts.

    Args:
        counts: tokens of each row's prompt, with the template.
        limit: None keeps all rows.
        key: the yaml key of the rows.
        log: shows a message to the user.

    Raises:
        ValueError: truncation=error and a prompt is too long; or drop and no row is left, or none of a mixture's part.
    """
    if limit is None or max(counts) <= limit.most:
        return rows, counts
    most = limit.most
    short = [number for number, count in enumerate(counts) if count <= most]
    if limit.refuses(max(counts)):
        longest = counts.index(max(counts))
        raise ValueError(f"{key}: {place(rows, longest)}: the prompt has {limit.refusal(counts[longest])}")
    message = (
        f"{key}: {len(rows) - len(short)} of {len(rows)} prompts have more tokens than data.max_prompt_tokens={most}; "
        f"the longest has {max(counts)}"
    )
    if limit.cuts:
        log(f"{message}. They are cut to {most} tokens (data.truncation={limit.truncation})")
        return rows, [min(count, most) for count in counts]
    if not short:
        raise ValueError(f"{message}, the shortest {min(counts)}, and no row is left; raise data.max_prompt_tokens")
    log(f"{message}. They are dropped")
    left = rows.kept(short, key) if isinstance(rows, Mixed) else subset(rows, short)
    return left, [counts[number] for number in short]
