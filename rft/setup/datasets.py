"""What a run reads before there is a model, and whether it fits into that."""

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
    """Rows to train on, held-out sets by their names, and what makes token ids of them.

    Attributes:
        train: all rows, or the first ones of a stream.
        lengths: counts their tokens.
        stream: all rows of a stream, or None.
        said: while reading, for people.
    """

    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    train: Rows
    held_out: dict[str, Rows]
    lengths: Lengths
    stream: StreamedRows | None = None
    said: list[str] = field(default_factory=list)

    def rows(self, run: Run, say: Callable[[str], None]) -> Rows:
        """What a source of batches draws from; a stream is its own.

        Args:
            say: for people, while it is drawn from.
        """
        if self.stream is None:
            return self.train
        assert run.data.streaming is not None
        return self.stream.open(run.data.streaming, self.encoder, run.data.max_prompt_tokens, say)

    def fit(
        self,
        run: Run,
        check: Checks,
        shape: PretrainedConfig,
        prompted: bool,
        samples: bool,
        examples: Callable[[], list[int]] | None,
    ) -> None:
        """Drops rows with long prompts, and adds to `check` where what is left is too long for the model.

        Args:
            shape: of the model.
            prompted: whether the rows that train have prompts.
            samples: whether prompts are answered.
            examples: counts the tokens of the given texts that train; None where there are none.

        Raises:
            ValueError: data.max_prompt_tokens is for rows that have no prompts.
        """
        most, new_tokens = run.data.max_prompt_tokens, run.rollout.max_new_tokens
        context = shape.get_text_config().max_position_embeddings
        if most is not None and not prompted:
            raise ValueError(
                f"data.max_prompt_tokens={most}: rows that are conversations or texts have no prompts; set "
                "data.max_prompt_tokens=null"
            )
        if self.stream is not None:
            assert run.data.streaming is not None
            self.said.append(f"data.train is streamed: its first {len(self.train)} rows were looked at")
            self.encoder.context = context
            if samples:
                check.attempt(check_room, run.data.streaming, most, context, new_tokens)
        elif most is not None or (samples and prompted):
            check.attempt(self._fit_train, most, shape, new_tokens if samples else None)
        fit_held_out(self.held_out, self.lengths, run, check, shape, self.said.append)
        if examples is not None:
            check.run(lambda: check_examples(examples(), context))

    def _fit_train(self, most: int | None, shape: PretrainedConfig, new_tokens: int | None) -> None:
        counts = self.lengths.prompts(self.train)
        self.train, counts = filter_overlong_prompts(self.train, counts, most, "data.train", self.said.append)
        if new_tokens is not None:
            check_lengths("data.train", counts, shape, new_tokens)


def fit_held_out(
    sets: dict[str, Rows],
    lengths: Lengths,
    run: Run,
    check: Checks,
    shape: PretrainedConfig,
    say: Callable[[str], None],
) -> None:
    """Drops rows with long prompts from held-out sets, and adds to `check` where an answer to one has no room.

    Args:
        lengths: counts their tokens.
        shape: of the model.
        say: for people.
    """

    def fit(name: str) -> None:
        key, counts = f"data.eval.{name}", lengths.prompts(sets[name])
        sets[name], counts = filter_overlong_prompts(sets[name], counts, run.data.max_prompt_tokens, key, say)
        check_lengths(key, counts, shape, run.rollout.max_new_tokens)

    for name in list(sets):
        check.attempt(fit, name)
