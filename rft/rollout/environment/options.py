"""The options of a run whose answers are episodes: its environments, how tools are called, and limits."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rft.batch.turn_columns import TURN_COLUMNS
from rft.data.encode.encoder import Encoder
from rft.data.encode.templates import PROBE, ChatTemplate
from rft.data.tool_calls import TOOL_CALLS, find_format, read_by, reads_calls
from rft.errors import build_each, did_you_mean
from rft.ranges import PositiveInt, Seconds
from rft.registry import Plugin, convert
from rft.rollout.answerer import Episodes
from rft.rollout.environment.call_format import CallFormat, CallReader
from rft.rollout.environment.contract import FIELD, EnvironmentClass, environment_class
from rft.rollout.environment.hosted import prepare
from rft.rollout.environment.renderers import PackageRenderer, RendererCalls, check_renderer, renderer_of
from rft.rollout.environment.turn_template import TurnTemplate

KEY = "environment"
FORMAT, AUTO = f"{KEY}.tool_format", "auto"


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


@dataclass(frozen=True)
class Environments(Episodes):
    """See `Episodes`.

    Attributes:
        classes: by their names.
        format: finds tool calls in the text of an answer; None: that of the template.
        options: as the yaml has them.
    """

    classes: Mapping[str, EnvironmentClass]
    format: Plugin | None
    options: EnvironmentOptions

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
        made = cls(classes, format, options)
        for package in ("fastapi", "uvicorn") if made.plays else ():
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"{KEY}.classes: an agent needs the package {package}: pip install 'rft[serve]'")
        return made

    def check(self, encoder: Encoder) -> None:
        """See `Episodes.check`. Prepares the classes, and builds those that will live in this process."""
        if encoder.chat is None:
            raise ValueError(
                f"{KEY}: data.template=none has no form for several turns; set data.template=chat, or the name or path "
                "of a template"
            )
        for name, found in self.classes.items():
            if found.tools and self._described:
                encoder.chat.schemas(list(found.tools.values()), f"the tools of {KEY}.classes.{name}")
                self._check_format(encoder)
        if (renderer := self._renderer(encoder)) is not None:
            renderer.check(encoder, self._tools(encoder.chat))
        for name, found in self.classes.items():
            try:
                prepare(found.target)
                if self.options.workers == "inline" and not found.plays:
                    found.target.build()
            except (ValueError, OSError) as error:
                raise ValueError(f"{KEY}.classes.{name}: {error}") from error

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
        return RendererCalls(renderer) if renderer is not None and renderer.reads_calls(encoder) else None

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
            found = find_format(chat)
            cure = f"set it to {AUTO}, which is {found}" if found else f"choose another ({known}) or another template"
            raise ValueError(
                f"{FORMAT}={self.format.name}: it does not read the calls that data.template={chat.name} writes; {cure}"
            )

    @property
    def _described(self) -> bool:
        return self.format is None or self.format.facts.described

    def _renderer(self, encoder: Encoder) -> PackageRenderer | None:
        name, chat = self.options.renderer, encoder.chat
        return None if name is None or chat is None else renderer_of(name, chat)

    def _tools(self, chat: ChatTemplate) -> list[list[dict[str, Any]]]:
        """The tools that the template renders in dialogues of each class; those of an agent are not known yet."""
        if not (chat.takes_tools and self._described):
            return []
        return [[PROBE] if found.plays else list(found.tools.values()) for found in self.classes.values()]

    @property
    def max_tokens(self) -> int:
        """See `Episodes.max_tokens`."""
        return self.options.max_tokens

    @property
    def columns_if_read(self) -> tuple[str, ...]:
        """See `Episodes`: rewards of turns only if every class has steps, states before turns only if no class plays by
        itself."""
        known = {"turn_scores": all(found.steps for found in self.classes.values()), "anchor": not self.plays}
        return tuple(name for name in TURN_COLUMNS if known.get(name, True))

    @property
    def plays(self) -> bool:
        """Whether a class plays by itself, and so needs the gateway."""
        return any(found.plays for found in self.classes.values())

    @property
    def scores(self) -> bool:
        """See `Episodes.scores`."""
        return all(found.scores for found in self.classes.values())

    @property
    def several_players(self) -> bool:
        """See `Episodes.several_players`."""
        return any(found.players > 1 for found in self.classes.values())

    def number_of(self, row: Mapping[str, Any], player: int = 0) -> int:
        """The number of a player of the environment of a row among all players of the run. Raises as `name_of`.

        Args:
            player: of a game, from 0.
        """
        name, first = self.name_of(row), 0
        for other, found in self.classes.items():
            if other == name:
                break
            first += found.players
        return first + player

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
