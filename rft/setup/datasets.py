"""Tokenizer and rows of a run, which are loaded before the model, and the checks of their lengths against it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Examples, Lengths, limit_prompts
from rft.data.encode.masks import explain
from rft.data.encode.truncation import PromptLimit
from rft.data.rows.lazy import Rows
from rft.data.rows.stream import StreamedRows, check_room
from rft.errors import Checks
from rft.setup.constraints import check_examples, check_lengths, prefixed
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
        messages: notes for the user, collected while the rows are read.
    """

    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    train: Rows
    held_out: dict[str, Rows]
    lengths: Lengths
    stream: StreamedRows | None = None
    canary: Rows = ()
    messages: list[str] = field(default_factory=list)

    def rows(self, run: Run, log: Callable[[str], None]) -> Rows:
        """The rows that a source of batches draws from: `train`, or the opened stream.

        Args:
            log: shows a message to the user while a stream is read.
        """
        if self.stream is None:
            return self.train
        assert run.data.streaming is not None
        limit = self.encoder.limit
        drop_above = limit.most if limit is not None and limit.truncation == "drop" else None
        return self.stream.open(run.data.streaming, self.encoder, drop_above, log)

    def fit(
        self,
        run: Run,
        check: Checks,
        model_config: PretrainedConfig,
        prompted: bool,
        samples: bool,
        examples: Callable[[Rows], Examples] | None,
        generates: bool,
        answer_tokens: int | None,
    ) -> None:
        """Applies `data.truncation` to long prompts, and adds a message to `check` for rows too long for the model.

        Args:
            model_config: the transformers config of the policy.
            prompted: whether the training rows have prompts.
            samples: whether the engine samples answers to them.
            examples: the facts of the given texts of some rows; None if the source has no given texts.
            generates: held-out rows are prompts; otherwise they are given texts.
            answer_tokens: most tokens of an answer to them; None if the policy scores texts and answers none.

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
            self.encoder.context = context
            if samples:
                check.attempt(check_room, run.data.streaming, most, context, new_tokens)
        elif most is not None or (samples and prompted):
            check.attempt(self._fit_train, model_config, new_tokens if samples else None)
        if self.stream is None and len(self.train) < run.batch.prompts:
            self.messages.append(
                f"data.train has {len(self.train)} rows, fewer than batch.prompts={run.batch.prompts}: rows repeat "
                "within a step"
            )
        if generates:
            fit_held_out(self.held_out, self.lengths, run, check, model_config, answer_tokens, self.messages.append)
        if examples is not None:
            given = {"data.train": self.train}
            if not generates:
                self._limit_held_out(check)
                given |= {f"data.eval.{name}": rows for name, rows in self.held_out.items()}
            for key, rows in given.items():
                check.attempt(fit_examples, key, rows, examples, context, self.messages.append)

    def _limit_held_out(self, check: Checks) -> None:
        """Applies `data.truncation` to the prompts of held-out texts."""
        limit = self.encoder.limit
        for name in self.held_out if limit is not None else ():
            check.attempt(self._limit, name, limit)

    def _limit(self, name: str, limit: PromptLimit) -> None:
        rows, key = self.held_out[name], f"data.eval.{name}"
        counts = count_prompts(self.lengths, rows, key)
        self.held_out[name], _ = limit_prompts(rows, counts, limit, key, self.messages.append)

    def _fit_train(self, model_config: PretrainedConfig, new_tokens: int | None) -> None:
        counts, limit = count_prompts(self.lengths, self.train, "data.train"), self.encoder.limit
        self.train, counts = limit_prompts(self.train, counts, limit, "data.train", self.messages.append)
        if new_tokens is not None:
            check_lengths("data.train", counts, model_config, new_tokens)


def count_prompts(lengths: Lengths, rows: Rows, key: str) -> list[int]:
    """Tokens of each row's prompt, before `data.truncation` cuts it.

    Raises:
        ValueError: a prompt cannot be encoded; names the key of the rows, and the row.
    """
    with prefixed(f"{key}: "):
        return lengths.whole_prompts(rows)


def fit_examples(
    key: str, rows: Rows, examples: Callable[[Rows], Examples], context: int, log: Callable[[str], None]
) -> None:
    """Checks that given texts can be encoded, and that none is longer than the model's context.

    Logs how many answers of conversations train.

    Args:
        key: of the rows.
        examples: the facts of the texts of some rows.
        context: the model's maximal number of tokens.
        log: shows a message to the user.

    Raises:
        ValueError: names the key.
    """
    with prefixed(f"{key}: "):
        found = examples(rows)
    if (message := explain(found.answers, len(found.tokens))) is not None:
        log(f"{key}: {message}")
    check_examples(key, found.tokens, context)


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
