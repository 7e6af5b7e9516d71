"""Tokenizer and rows of a run, which are loaded before the model, and the checks of their lengths against it."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rft.data.base import GivenTexts, SourceContext
from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Counts, Lengths, count_tokens, limit_prompts, limit_texts
from rft.data.encode.masks import explain
from rft.data.encode.truncation import PromptLimit, TextLimit
from rft.data.fingerprint import fingerprint
from rft.data.rows.lazy import Row, Rows, located
from rft.data.rows.stream import RowFilter, StreamedRows, check_room
from rft.distributed import SINGLE_PROCESS
from rft.errors import Checks, prefixed
from rft.setup.constraints import check_lengths
from rft.setup.schema import Run


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

    def rows(self, run: Run, given: GivenTexts | None, log: Callable[[str], None]) -> Rows:
        """The rows that a source of batches draws from: `train`, or the opened stream.

        Args:
            given: the given texts of the source, or None.
            log: shows a message to the user while a stream is read.
        """
        if self.stream is None:
            return self.train
        assert run.data.streaming is not None
        filters, prompt_limit, text_limit = [], self.encoder.limit, self.encoder.text_limit
        if prompt_limit is not None and prompt_limit.truncation == "drop":
            filters.append(short_prompts(self.encoder, prompt_limit))
        if given is not None and text_limit is not None and text_limit.overlong != "error":
            filters.append(short_texts(self.encoder, text_limit, given, self.stream))
        return self.stream.open(run.data.streaming, filters, log)

    def fingerprints(self) -> dict[str, str]:
        """A hash of each data set, by its yaml key; of a stream that of its first rows."""
        sets = {"data.train": self.train} | {f"data.eval.{name}": rows for name, rows in self.held_out.items()}
        sets |= {"reward.canary.path": self.canary} if self.canary else {}
        return {key: fingerprint(rows) for key, rows in sets.items()}

    def fit(
        self,
        run: Run,
        check: Checks,
        model_config: PretrainedConfig,
        prompted: bool,
        samples: bool,
        stages: Sequence[GivenTexts | None],
        held_out: GivenTexts | None,
        answer_tokens: int | None,
    ) -> None:
        """Applies `data.truncation` and `data.overlong`, and adds a message to `check` for rows that are too long.

        Args:
            model_config: the transformers config of the policy.
            prompted: whether the training rows have prompts.
            samples: whether the engine samples answers to them.
            stages: the given texts of each stage, or None.
            held_out: the given texts of held-out rows; None if the policy answers their prompts.
            answer_tokens: most tokens of an answer to them; None if it answers none.

        Raises:
            ValueError: data.max_prompt_tokens is set, but the rows have no prompts.
        """
        most, new_tokens = run.data.max_prompt_tokens, run.rollout.max_new_tokens
        context = model_config.get_text_config().max_position_embeddings
        if most is not None and not prompted:
            raise ValueError(
                f"data.max_prompt_tokens={most}: rows that are conversations or texts have no prompts; set "
                "data.max_prompt_tokens=null"
            )
        if self.stream is not None:
            assert run.data.streaming is not None
            self.messages.append(f"data.train is streamed: only its first {len(self.train)} rows were checked")
            if samples:
                check.attempt(check_room, run.data.streaming, most, context, new_tokens)
        elif most is not None or (samples and prompted):
            check.attempt(self._fit_train, model_config, new_tokens if samples else None)
        if self.stream is None and len(self.train) < run.batch.prompts:
            self.messages.append(
                f"data.train has {len(self.train)} rows, fewer than batch.prompts={run.batch.prompts}: rows repeat "
                "within a step"
            )
        if held_out is None:
            fit_held_out(self.held_out, self.lengths, run, check, model_config, answer_tokens, self.messages.append)
        mistakes = len(check.messages)
        text_limit = check.attempt(run.data.text_limit, context, self.encoder.media_facts)
        for given in stages if text_limit is not None else ():
            self.longest_text = None
            if given is not None:
                check.attempt(self._fit_texts, given, text_limit)
        if text_limit is not None and held_out is not None:
            fit_held_out_texts(self.held_out, self.lengths, run, check, text_limit, held_out, self.messages.append)
        if len(check.messages) == mistakes:  # else mode=inspect shows the rows as they are
            self.encoder.text_limit = text_limit

    def _fit_texts(self, given: GivenTexts, limit: TextLimit) -> None:
        log = (lambda message: None) if self.stream is not None else self.messages.append
        rows, counts = fit_texts("data.train", self.train, self.lengths, limit, given, log)
        self.train, self.longest_text = rows, int(counts.max())

    def _fit_train(self, model_config: PretrainedConfig, new_tokens: int | None) -> None:
        counts, limit = count_prompts(self.lengths, self.train, "data.train"), self.encoder.limit
        self.train, counts = limit_prompts(self.train, counts, limit, "data.train", self.messages.append)
        if new_tokens is not None:
            check_lengths("data.train", counts, model_config, new_tokens)


def count_prompts(lengths: Lengths, rows: Rows, key: str) -> Counts:
    """Tokens of each row's prompt, before `data.truncation` cuts it.

    Raises:
        ValueError: a prompt cannot be encoded; names the key of the rows, and the row.
    """
    with prefixed(f"{key}: "):
        return lengths.whole_prompts(rows)


def fit_texts(
    key: str, rows: Rows, lengths: Lengths, limit: TextLimit, given: GivenTexts, log: Callable[[str], None]
) -> tuple[Rows, Counts]:
    """Applies `data.overlong` to rows of given texts.

    Logs how many answers of conversations train, and how many pairs have two equal responses.

    Args:
        key: of the rows.
        lengths: counts the tokens of rows.
        log: shows a message to the user.

    Returns:
        The rows that stay, and their tokens.

    Raises:
        ValueError: a text cannot be encoded, or is too long; names the key and the row.
    """
    with prefixed(f"{key}: "):
        texts = lengths.texts(given, rows)
    kept = limit_texts(rows, texts, limit, key, log)
    kept_texts = limit.keeps(texts.tokens, texts.least)  # (N,)
    if (message := explain(texts.answers[kept_texts].sum(0).tolist())) is not None:
        log(f"{key}: {message}")
    if equal := int(texts.equal[kept_texts].sum()):
        log(
            f"{key}: {equal:,} of {int(kept_texts.sum()):,} pairs have two equal responses, which hold no preference "
            "and count as other pairs do; remove them"
        )
    return kept


def fit_held_out_texts(
    sets: dict[str, Rows],
    lengths: Lengths,
    run: Run,
    check: Checks,
    limit: TextLimit,
    given: GivenTexts,
    log: Callable[[str], None],
) -> None:
    """Applies `data.truncation` and `data.overlong` to sets of given texts; adds messages to `check`."""

    def fit(name: str) -> None:
        key, rows = f"data.eval.{name}", sets[name]
        if run.data.prompt_limit is not None:
            rows, _ = limit_prompts(rows, count_prompts(lengths, rows, key), run.data.prompt_limit, key, log)
        sets[name], _ = fit_texts(key, rows, lengths, limit, given, log)

    for name in list(sets):
        check.attempt(fit, name)


def short_prompts(encoder: Encoder, limit: PromptLimit) -> RowFilter:
    """Keeps the rows of a stream whose prompts are not too long."""

    def keeps(rows: list[Row]) -> list[bool]:
        return [len(prompt) <= limit.most for prompt in encoder.whole_prompts(rows)]

    return RowFilter(keeps, f"their prompts have more tokens than data.max_prompt_tokens={limit.most}")


def short_texts(encoder: Encoder, limit: TextLimit, given: GivenTexts, stream: StreamedRows) -> RowFilter:
    """Keeps the rows of a stream whose given texts are not too long, or can be cut.

    Args:
        stream: a stream that is not opened.
    """
    whole = copy(encoder)
    whole.text_limit = None
    texts = given.build(SourceContext(SINGLE_PROCESS, 0, whole, stream, 1, (), False)).texts

    def keeps(rows: list[Row]) -> list[bool]:
        kept = []
        for number, row in enumerate(rows):
            with located(rows, number):
                kept.append(bool(limit.keeps(*count_tokens(texts(number, row), whole)[:2])))
        return kept

    why = f"they have more tokens than {limit.name}"
    if limit.overlong == "truncate":
        why += f", and {limit.uncuttable}"
    return RowFilter(keeps, why)


def fit_held_out(
    sets: dict[str, Rows],
    lengths: Lengths,
    run: Run,
    check: Checks,
    model_config: PretrainedConfig,
    answer_tokens: int | None,
    log: Callable[[str], None],
) -> None:
    """Applies `data.truncation` to held-out sets; adds a message to `check` if an answer does not fit the context.

    Args:
        lengths: counts the tokens of rows.
        model_config: the transformers config of the policy.
        answer_tokens: most tokens of an answer; None if the policy scores texts and answers none.
        log: shows a message to the user.
    """

    def fit(name: str) -> None:
        key = f"data.eval.{name}"
        counts = count_prompts(lengths, sets[name], key)
        sets[name], counts = limit_prompts(sets[name], counts, run.data.prompt_limit, key, log)
        if answer_tokens is not None:
            check_lengths(key, counts, model_config, answer_tokens)

    for name in list(sets):
        check.attempt(fit, name)
