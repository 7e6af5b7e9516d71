"""The abstract class of a source of batches, and the dataclasses that describe and configure one.

A class that implements `Source` can be named in a yaml as `algorithm.source`. The other keys of that node are the
fields of the dataclass that the class names as its `Options`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import EPISODE_COLUMNS
from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Row, Rows, located
from rft.data.sampler import make_sampler
from rft.distributed import World
from rft.metrics import Metrics


@dataclass(frozen=True)
class SourceContext:
    """What the run passes to every source of a stage.

    Sources that sample receive more: `rft.rollout.source.base.RolloutContext`.

    Attributes:
        world: the processes; a batch is this rank's share of a step.
        seed: the seed of the run.
        encoder: turns rows into token ids.
        rows: the rows of the data set.
        prompts: rows of the data set in a step, over all ranks.
        columns: the columns that the algorithm reads, sorted.
        shuffle: `data.shuffle`: whether rows come in a random order, or in their own.
    """

    world: World
    seed: int
    encoder: Encoder
    rows: Rows
    prompts: int
    columns: tuple[str, ...]
    shuffle: bool

    @property
    def share(self) -> slice:
        """This rank's part of what all ranks draw together."""
        return slice(self.world.rank, None, self.world.size)


@dataclass(frozen=True)
class CheckContext:
    """What is known about a run before data or a model is loaded.

    Attributes:
        key: the yaml key of the source, for messages.
        prompts: rows of the data set in a step, over all ranks.
        group_size: responses to a prompt.
        max_new_tokens: cap on the tokens of a response.
        cap_key: the yaml key that sets the cap.
        reads: the columns that the algorithm reads; None if the algorithm is in error.
        terms: the names of the reward's terms; None if the reward is in error.
        streaming: `data.streaming`, the number of streamed rows that are shuffled together; or None.
        mixture: whether `data.train` is a mixture, whose weights decide how often a row is drawn.
        shuffle: `data.shuffle`.
    """

    key: str
    prompts: int
    group_size: int
    max_new_tokens: int
    cap_key: str
    reads: Collection[str] | None
    terms: Collection[str] | None
    streaming: int | None
    mixture: bool
    shuffle: bool


@dataclass(frozen=True)
class GivenTexts:
    """The class and options of a source of given texts, not built yet.

    Attributes:
        source: its class, a `GivenSource`; the constructor takes a plain `SourceContext`.
        options: of this class.
    """

    source: type["GivenSource"]
    options: "SourceOptions"

    def build(self, context: SourceContext) -> "GivenSource":
        """The source; raises what its constructor raises."""
        return self.source(options=self.options, context=context)

    def epoch(self, context: SourceContext) -> Iterator[TensorDict]:
        """This rank's batches, until as many rows are drawn as the data set has.

        Raises:
            ValueError: a row cannot be encoded.
        """
        source = self.build(context)
        for _ in range(-(-len(context.rows) // context.prompts)):
            yield source.next(Metrics())


@dataclass(frozen=True)
class SourceFacts:
    """What a source with certain options reads, writes and samples.

    Attributes:
        writes: columns that every batch has; at least `rft.batch.columns.SOURCE_COLUMNS`.
        fields: fields of a row of the data set that the source reads, not null.
        sampled: whether the engine samples the batches of all steps, of some, or of none.
        writes_if_read: columns that a batch has if the algorithm reads them.
        scores: whether the source calls the reward; a row must then have the fields of the reward.
        episodes: whether it runs episodes where the run has environments; it then also writes `EPISODE_COLUMNS`.
        given: the given texts of a source that also samples, or None. Unused if `sampled` is "never", because all texts
            are given then.
    """

    writes: tuple[str, ...]
    fields: tuple[str, ...]
    sampled: Literal["always", "sometimes", "never"]
    writes_if_read: tuple[str, ...] = ()
    scores: bool = False
    episodes: bool = False
    given: GivenTexts | None = None

    def with_episodes(self, if_read: tuple[str, ...]) -> "SourceFacts":
        """The facts in a run with environments.

        Args:
            if_read: columns that episodes of these environments have if the algorithm reads them.
        """
        if not self.episodes:
            return self
        writes = tuple(dict.fromkeys((*self.writes, *EPISODE_COLUMNS)))
        return replace(self, writes=writes, writes_if_read=(*self.writes_if_read, *if_read))


@dataclass(frozen=True)
class SourceOptions(ABC):
    """The options of a source, and what follows from them before one is built."""

    @abstractmethod
    def facts(self) -> SourceFacts:
        """The facts of a source with these options."""

    def check(self, context: CheckContext) -> None:
        """Checks the options against the run, before data or a model is loaded.

        Raises:
            ValueError: names the yaml key and the cure.
        """

    def check_tokens(self, context: CheckContext, encoder: Encoder) -> None:
        """Checks options that depend on the tokenizer, before a model is loaded.

        Raises:
            ValueError: names the yaml key and the cure.
        """

    def always_sampled(self) -> Self:
        """The options with which the engine samples every step, or unchanged options if there are none.

        mode=plan uses them, because a sampled step takes at least as much memory; mode=doctor compares sampled texts.
        """
        return self


class Source(ABC):
    """Produces the batches of a stage from rows of the data set.

    Args:
        options: of the yaml.
        context: of the stage: a `SourceContext`, or a `RolloutContext` if the class samples.

    Attributes:
        Options: the dataclass of the options.
        options, context: as given.
        row_sampler: draws the rows of a step for all ranks, of which each takes its `context.share`.
        temperature: divides the logits when log-probabilities of the batches are computed.
    """

    Options: ClassVar[type[SourceOptions]]
    temperature: float = 1.0

    def __init__(self, options: Any, context: Any) -> None:
        self.options = options
        self.context = context
        self.row_sampler = make_sampler(context.rows, context.seed, context.shuffle)

    def samples(self) -> bool:
        """Whether the engine samples the next batch; the same on every rank. Sources that sample sometimes write it."""
        return bool(self.options.facts().sampled == "always")

    @abstractmethod
    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's rows of the next step.

        Args:
            metrics: the metrics of the step, to which the source adds its own.
        """

    def waiting(self) -> list[int]:
        """The groups of this rank that are kept for later steps, for the ledger of the run."""
        return []

    def dropped(self) -> dict[str, list[int]]:
        """The groups of this rank that were drawn since the last call and never train, by the reason."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: the position in the data, and the rows that all ranks keep for later steps.

        The same on every rank. A collective.
        """
        return self.row_sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned, maybe on another number of ranks."""
        self.row_sampler.load_state_dict(state)

    def close(self) -> None:
        """Gives up what is made for later steps. The trainer calls it at the end of the stage."""


class GivenSource(Source):
    """A source of given texts. It states what it makes of one row, so that the run can count the tokens of each row
    before a model is loaded, and drop rows.
    """

    context: SourceContext

    @abstractmethod
    def texts(self, position: int, row: Row) -> list[dict[str, Any]]:
        """The batch rows of a row of the data set, as `rft.batch.collate` takes them.

        Args:
            position: their group and their unit.
        """

    def next(self, metrics: Metrics) -> TensorDict:
        """The texts of this rank's rows of the next step."""
        return collate(self.draw(self.texts))

    def draw(self, make: Callable[[int, Row], list[Any]]) -> list[Any]:
        """Draws this rank's share of the next step.

        Args:
            make: takes a position and its row of the data set, and returns what is made of them.

        Raises:
            ValueError: `make` raised one; names the place of the row.
        """
        made, rows = [], self.context.rows
        for position, number in self.row_sampler.take(self.context.prompts)[self.context.share]:
            with located(rows, number):
                made += make(position, rows[number])
        return made


def given_texts(source: type[Source], options: SourceOptions) -> GivenTexts | None:
    """The given texts of a source; None if the engine samples all texts.

    Raises:
        ValueError: all texts are given, and the class is no `GivenSource`.
    """
    facts = options.facts()
    if facts.sampled != "never":
        return facts.given
    if not issubclass(source, GivenSource):
        raise ValueError(
            f"{source.__name__} samples no texts; derive it from rft.data.base.GivenSource, whose method `texts` "
            "states what it makes of one row"
        )
    return GivenTexts(source, options)
