"""The options of a run whose answers are episodes: its environments, how tools are called, and limits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rft.algorithm.algorithm import Algorithm
from rft.batch.turn_columns import TURN_COLUMNS
from rft.data.base import SourceFacts
from rft.data.encode.base import Template
from rft.data.encode.encoder import Encoder
from rft.data.encode.templates import PROBE
from rft.data.tool_calls import TOOL_CALLS, find_format, read_by, reads_calls
from rft.errors import build_each, did_you_mean
from rft.imports import require_package
from rft.ranges import PositiveInt, Seconds
from rft.registry import Plugin, convert
from rft.rollout.answerer import REWARD, Episodes
from rft.rollout.environment.call_format import CallFormat, CallReader
from rft.rollout.environment.contract import FIELD, EnvironmentClass, environment_class
from rft.rollout.environment.hosted import prepare
from rft.rollout.environment.renderers import PackageRenderer, check_renderer, renderer_of
from rft.rollout.environment.turn_template import TurnTemplate

KEY = "environment"
FORMAT, AUTO = f"{KEY}.tool_format", "auto"
NO_EPISODES = ("plan", "generate", "chat", "doctor")  # modes that sample single completions


@dataclass
class EnvironmentOptions:
    """The node `environment`.

    Attributes:
        classes: nodes `{_target_, options}` by name. With several of them a row names its own in the field
            `environment`.
        tool_format: how the model writes calls: `auto`, as the chat template does; or an entry of `TOOL_CALLS`, by name
            or as a node with its options.
        max_turns: answers of an episode.
        max_tokens: of an episode behind its prompt, those that the environment gives included.
        max_seconds: of an episode; an episode that takes longer has no score. None: no limit.
        tool_deadline_s: seconds of one call of an environment; None: no limit.
        tool_max_tokens: of one output of a tool or observation; a longer one is cut.
        workers: `inline`, in this process; `process`, a process for each episode, which a deadline ends and whose death
            ends nothing but the episode.
        concurrency: calls of environments at the same time.
        renderer: of the package `renderers`, which has the tokens between two answers: its name, `auto` or None; see
            `rft.rollout.environment.renderers`.
    """

    classes: dict[str, Any]
    tool_format: Any
    max_turns: PositiveInt
    max_tokens: PositiveInt
    max_seconds: Seconds | None
    tool_deadline_s: Seconds | None
    tool_max_tokens: PositiveInt
    workers: Literal["inline", "process"]
    concurrency: PositiveInt
    renderer: str | None


@dataclass(frozen=True, kw_only=True)
class Environments(Episodes):
    """The environments of a run, with their options.

    Attributes:
        classes: by their names.
        format: finds tool calls in the text of an answer; None: that of the template.
        options: as the yaml has them.
        plays: whether a class plays by itself, and so needs the gateway.
    """

    classes: Mapping[str, EnvironmentClass]
    format: Plugin | None
    options: EnvironmentOptions
    plays: bool

    @classmethod
    def of(cls, options: EnvironmentOptions) -> "Environments":
        """Imports the classes and reads their contracts.

        Raises:
            ValueError: names the key and the cure.
        """
        if not options.classes:
            raise ValueError(f"{KEY}.classes is empty: name a class of environments, {{shop: {{_target_: ...}}}}")
        classes = build_each(lambda name, node: environment_class(node, f"{KEY}.classes.{name}"), options.classes)
        node = {"name": options.tool_format} if isinstance(options.tool_format, str) else options.tool_format
        format = None if node == {"name": AUTO} else TOOL_CALLS.build(node, FORMAT)
        if options.renderer is not None:
            check_renderer(options.renderer)
        kinds = classes.values()
        plays = any(kind.plays for kind in kinds)
        for package in ("fastapi", "uvicorn") if plays else ():
            cure = f"{KEY}.classes: an agent needs the package {package}: pip install 'rft[serve]'"
            require_package(package, cure)
        # rewards of turns only if every class has steps, states before turns only if no class plays by itself
        known = {"turn_scores": all(kind.steps for kind in kinds), "anchor": not plays}
        return cls(
            classes=classes,
            format=format,
            options=options,
            plays=plays,
            max_tokens=options.max_tokens,
            columns_if_read=tuple(name for name in TURN_COLUMNS if known.get(name, True)),
            scores=all(kind.scores for kind in kinds),
            several_players=any(kind.players > 1 for kind in kinds),
        )

    def check_run(
        self, algorithm: Algorithm, facts: SourceFacts, mode: str, scored: bool, media: bool, canary: bool
    ) -> Iterator[str]:
        if scored and not self.scores:
            yield f"reward.terms.{REWARD}: a class of environment.classes has no get_reward; add it, or remove the term"
        if scored and algorithm.options.turn_rewards is not None:
            yield (
                f"algorithm.turn_rewards: the score has the rewards of all turns already, by reward.terms.{REWARD}; "
                "choose another reward, or set algorithm.turn_rewards=null"
            )
        if facts.sampled != "never" and not facts.episodes:
            yield "environment: this source runs no episodes; choose algorithm/source=rollout, or environment=none"
        if media:
            yield "environment: dialogues have no media yet; set actor/processor=none, or environment=none"
        if canary:
            yield "environment: canary tasks are answered without it; set reward.canary.path=null, or environment=none"
        if mode in NO_EPISODES:
            yield f"environment: mode={mode} runs no episodes; set environment=none"
        if self.several_players:
            yield from _compared_players(algorithm)

    def check(self, encoder: Encoder) -> None:
        """Also prepares the classes, and builds those that will live in this process. Raises as of `Episodes`."""
        if encoder.chat is None:
            raise ValueError(
                f"{KEY}: data.template=none has no form for several turns; set data.template=chat, or the name or path "
                "of a template"
            )
        for name, kind in self.classes.items():
            if kind.tools and self._described:
                encoder.chat.schemas(list(kind.tools.values()), f"the tools of {KEY}.classes.{name}")
                self._check_format(encoder)
        if (renderer := self._renderer(encoder)) is not None:
            renderer.check(encoder, self._tools(encoder.chat))
        for kind in self.classes.values():
            prepare(kind.target, build=self.options.workers == "inline" and not kind.plays)

    def template(self, encoder: Encoder) -> TurnTemplate:
        """Encodes the dialogues of a run, with the renderer of the options.

        Raises:
            ValueError: the renderer cannot be built with the tokenizer and `data.template_arguments`; names the key.
        """
        return TurnTemplate(encoder, self._renderer(encoder))

    def call_format(self, encoder: Encoder) -> CallReader | None:
        """Reads the calls of answers; None where neither a format nor the renderer reads those of the template."""
        if self.format is not None:
            return CallFormat(self.format, encoder)
        name = None if encoder.chat is None else find_format(encoder.chat)
        if name is not None:
            return CallFormat(TOOL_CALLS.build({"name": name}, FORMAT), encoder)
        renderer = self._renderer(encoder)
        return renderer if renderer is not None and renderer.reads_calls(encoder) else None

    def _check_format(self, encoder: Encoder) -> None:
        """Refuses a template whose calls do not come back."""
        chat, known = encoder.chat, ", ".join(TOOL_CALLS.names())
        assert chat is not None
        if self.format is None and self.call_format(encoder) is None:
            does = "in a form that no format reads" if chat.writes_calls else "nowhere"
            raise ValueError(
                f"{FORMAT}={AUTO}: data.template={chat.name} writes calls of tools {does}; set it to the format in "
                f"which the model writes them ({known}), set {KEY}.renderer to one of the package renderers that reads "
                "them, or register a format of your own"
            )
        if self.format is not None and chat.writes_calls and not reads_calls(chat, read_by(self.format)):
            fitting = find_format(chat)
            cure = (
                f"set it to {AUTO}, which is {fitting}" if fitting else f"choose another ({known}) or another template"
            )
            raise ValueError(
                f"{FORMAT}={self.format.name}: it does not read the calls that data.template={chat.name} writes; {cure}"
            )

    @property
    def _described(self) -> bool:
        return self.format is None or self.format.facts.described

    def _renderer(self, encoder: Encoder) -> PackageRenderer | None:
        name, chat = self.options.renderer, encoder.chat
        return None if name is None or chat is None else renderer_of(name, chat)

    def _tools(self, chat: Template) -> list[list[dict[str, Any]]]:
        """The tools that the template renders in dialogues of each class; those of an agent are not known yet."""
        if not (chat.takes_tools and self._described):
            return []
        return [[PROBE] if kind.plays else list(kind.tools.values()) for kind in self.classes.values()]

    def number_of(self, row: Mapping[str, Any], player: int = 0) -> int:
        """The number of a player of the environment of a row among all players of the run. Raises as `name_of`.

        Args:
            player: of a game, from 0.
        """
        names = list(self.classes)
        earlier = names[: names.index(self.name_of(row))]
        return sum(self.classes[name].players for name in earlier) + player

    def name_of(self, row: Mapping[str, Any]) -> str:
        """The name of the environment of a row.

        Raises:
            ValueError: it names none, or one that is not there.
        """
        known = ", ".join(self.classes)
        if len(self.classes) == 1 and row.get(FIELD) is None:
            return next(iter(self.classes))
        name = row.get(FIELD)
        if name is None:
            raise ValueError(f"the row has no field {FIELD!r} with the name of its environment ({known}); add it")
        if name not in self.classes:
            raise ValueError(
                f"the field {FIELD!r} names {name!r}, none of {KEY}.classes, which are {known}"
                f"{did_you_mean(str(name), self.classes)}"
            )
        return str(name)


def environments(node: Any) -> Environments:
    """The environments of the node `environment`. Raises as `Environments.of`."""
    return Environments.of(convert(node, EnvironmentOptions, KEY))


def _compared_players(algorithm: Algorithm) -> Iterator[str]:
    """Refuses comparisons of the samples of a prompt, which are different players of games."""
    advantage, pick = algorithm.advantage, algorithm.selection
    said = "compares the samples of a prompt, which are different players in a game of environment.classes; choose"
    if advantage is not None and (advantage.facts.group_baseline or "greedy_scores" in advantage.facts.reads):
        yield f"algorithm.advantage={advantage.name}: it {said} algorithm/advantage=rae"
    if pick.facts.groups:
        yield f"algorithm.pick={pick.name}: it {said} algorithm.pick=all"
