"""Tokenizer and rows of a run, which are loaded before the model, and the checks of their lengths against it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Lengths, filter_overlong_prompts
from rft.data.rows.lazy import Rows
from rft.data.rows.stream import StreamedRows, check_room
from rft.errors import Checks
from rft.setup.constraints import check_examples, check_lengths
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
        messages: notes for the user, collected while the rows are read.
    """

    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    train: Rows
    held_out: dict[str, Rows]
    lengths: Lengths
    stream: StreamedRows | None = None
    messages: list[str] = field(default_factory=list)

    def rows(self, run: Run, log: Callable[[str], None]) -> Rows:
        """The rows that a source of batches draws from: `train`, or the opened stream.

        Args:
            log: shows a message to the user while a stream is read.
        """
        if self.stream is None:
            return self.train
        assert run.data.streaming is not None
        return self.stream.open(run.data.streaming, self.encoder, run.data.max_prompt_tokens, log)

    def fit(
        self,
        run: Run,
        check: Checks,
        model_config: PretrainedConfig,
        prompted: bool,
        samples: bool,
        examples: Callable[[Rows], list[int]] | None,
        generates: bool,
    ) -> None:
        """Drops rows with long prompts, and adds a message to `check` if a remaining row is too long for the model.

        Args:
            model_config: the transformers config of the policy.
            prompted: whether the training rows have prompts.
            samples: whether the engine samples answers to them.
            examples: counts the tokens of each given text of some rows; None if the source has no given texts.
            generates: held-out rows are prompts; otherwise they are given texts.

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
            check.attempt(self._fit_train, most, model_config, new_tokens if samples else None)
        if generates:
            fit_held_out(self.held_out, self.lengths, run, check, model_config, self.messages.append)
        if examples is not None:
            given = {"data.train": self.train}
            if not generates:
                if most is not None:
                    self._drop_held_out(most, check)
                given |= {f"data.eval.{name}": rows for name, rows in self.held_out.items()}
            for key, rows in given.items():
                check.run(lambda key=key, rows=rows: check_examples(key, examples(rows), context))

    def _drop_held_out(self, most: int, check: Checks) -> None:
        """Drops held-out rows with longer prompts."""
        for name, rows in self.held_out.items():
            key = f"data.eval.{name}"
            fitting = check.attempt(
                lambda key=key, rows=rows: filter_overlong_prompts(
                    rows, self.lengths.prompts(rows), most, key, self.messages.append
                )
            )
            self.held_out[name] = rows if fitting is None else fitting[0]

    def _fit_train(self, most: int | None, model_config: PretrainedConfig, new_tokens: int | None) -> None:
        counts = self.lengths.prompts(self.train)
        self.train, counts = filter_overlong_prompts(self.train, counts, most, "data.train", self.messages.append)
        if new_tokens is not None:
            check_lengths("data.train", counts, model_config, new_tokens)


def fit_held_out(
    sets: dict[str, Rows],
    lengths: Lengths,
    run: Run,
    check: Checks,
    model_config: PretrainedConfig,
    log: Callable[[str], None],
) -> None:
    """Drops rows with long prompts from held-out sets; adds a message to `check` if an answer does not fit the context.

    Args:
        lengths: counts the tokens of rows.
        model_config: the transformers config of the policy.
        log: shows a message to the user.
    """

    def fit(name: str) -> None:
        key, counts = f"data.eval.{name}", lengths.prompts(sets[name])
        sets[name], counts = filter_overlong_prompts(sets[name], counts, run.data.max_prompt_tokens, key, log)
        check_lengths(key, counts, model_config, run.rollout.max_new_tokens)

    for name in list(sets):
        check.attempt(fit, name)
