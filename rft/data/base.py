"""The protocol of a source of batches: what its class states, what it is given, and what the trainer asks of it.

A class that implements `Source` can be named in a yaml as `algorithm.source`. Its constructor takes `context`, and the
options of the yaml as keyword arguments: `def __init__(self, context: SourceContext, *, response: str) -> None`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tensordict import TensorDict

from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.metrics import Metrics


@dataclass(frozen=True)
class SourceContext:
    """What every source of a stage is given.

    A source that samples is given more: `rft.rollout.source.base.RolloutContext`.

    Attributes:
        world: the processes; a batch is this rank's share of a step.
        seed: of the run.
        encoder: makes token ids of rows.
        rows: of the data set.
        prompts: rows of the data set in a step, over all ranks.
        columns: what the algorithm reads, sorted.
    """

    world: World
    seed: int
    encoder: Encoder
    rows: Rows
    prompts: int
    columns: tuple[str, ...]


@dataclass(frozen=True)
class CheckContext:
    """What is known of a run before data or a model is loaded.

    Attributes:
        key: the yaml key of the source, for messages.
        prompts: rows of the data set in a step, over all ranks.
        group_size: responses to a prompt.
        max_new_tokens: cap on the tokens of a response.
        reads: the columns that the algorithm reads; None if the algorithm is in error.
        terms: the names of the reward's terms; None if the reward is in error.
        streaming: `data.streaming`: rows are read as they are drawn, and shuffled among so many; or None.
        mixture: whether `data.train` is a mixture, whose weights decide how often a row is drawn.
    """

    key: str
    prompts: int
    group_size: int
    max_new_tokens: int
    reads: Collection[str] | None
    terms: Collection[str] | None
    streaming: int | None
    mixture: bool


@dataclass(frozen=True)
class GivenTexts:
    """A source that samples nothing, not built yet.

    Attributes:
        source: its class; the constructor takes a plain `SourceContext`.
        options: keyword arguments of the constructor.
    """

    source: type["Source"]
    options: Mapping[str, Any]

    def epoch(self, context: SourceContext) -> Iterator[TensorDict]:
        """This rank's batches, until as many rows are drawn as the data set has.

        Raises:
            ValueError: a row cannot be encoded.
        """
        source = self.source(context, **self.options)
        for _ in range(-(-len(context.rows) // context.prompts)):
            yield source.next(Metrics())


@dataclass(frozen=True)
class SourceFacts:
    """What a source with certain options does.

    Attributes:
        writes: columns that every batch has; at least `rft.batch.columns.SOURCE_COLUMNS`.
        fields: fields of a row of the data set that the source reads, not null.
        sampled: whether the engine samples the batches of all steps, of some, or of none.
        writes_if_read: columns that a batch has where the algorithm reads them.
        scores: whether the source asks the reward, whose fields a row must then have, too.
        given: the given texts among what a source that samples draws, or None; without meaning where `sampled` is
            "never", because all texts are given then.
    """

    writes: tuple[str, ...]
    fields: tuple[str, ...]
    sampled: Literal["always", "sometimes", "never"]
    writes_if_read: tuple[str, ...] = ()
    scores: bool = False
    given: GivenTexts | None = None


class Source(ABC):
    """Where batches come from.

    Attributes:
        temperature: divides the logits wherever a log-probability of the batches is computed.
    """

    temperature: float = 1.0

    @abstractmethod
    def __init__(self, context: Any, **options: Any) -> None:
        """Takes what the stage shares, and the options of the yaml.

        Args:
            context: a `SourceContext`, or a `RolloutContext` where a class samples.
        """

    @classmethod
    @abstractmethod
    def facts(cls, options: Mapping[str, Any]) -> SourceFacts:
        """What a source with these options does.

        Args:
            options: keyword arguments of the constructor.
        """

    @classmethod
    def check(cls, options: Mapping[str, Any], context: CheckContext) -> None:
        """Checks the options against the run, before data or a model is loaded.

        Raises:
            ValueError: names the yaml key and the cure.
        """

    @classmethod
    def check_tokens(cls, options: Mapping[str, Any], context: CheckContext, encoder: Encoder) -> None:
        """Checks what options look like in tokens, before a model is loaded.

        Raises:
            ValueError: names the yaml key and the cure.
        """

    @classmethod
    def always_sampled(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with which the engine samples every step, or the same ones where there are none such.

        mode=plan counts with them, because a sampled step takes at least as much memory, and mode=doctor draws with
        them.
        """
        return dict(options)

    @abstractmethod
    def samples(self) -> bool:
        """Whether the engine samples the next batch; the same on every rank."""

    @abstractmethod
    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's rows of the next step.

        Args:
            metrics: of the step; takes what the source measures.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this rank: the place in the data, and everything that waits for a later step."""

    @abstractmethod
    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Continues from a checkpoint.

        Args:
            states: of all ranks that wrote it; their number may be another one now.
        """


def given_texts(source: type[Source], options: Mapping[str, Any]) -> GivenTexts | None:
    """The given texts among what a source draws; None where the engine samples all of it."""
    facts = source.facts(options)
    return GivenTexts(source, options) if facts.sampled == "never" else facts.given
