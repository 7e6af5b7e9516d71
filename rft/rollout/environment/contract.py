"""The contract of an environment: that of TRL's `environment_factory`. A class needs nothing of this project.

    class Shop:
        def reset(self, **row): ...                 # begins an episode; a text, chat messages or None
        def price(self, item: str) -> str: ...      # a tool: a public method with types and a docstring
        def get_reward(self) -> float: ...          # optional

In the place of tools a class may have Gymnasium's `step(self, action: str)`, which gets the text of every answer and
returns `(observation, reward, terminated, truncated, info)`. Every method may be `async def`. An optional `close()`
ends an episode.

What all episodes share, such as an index, may be made by a class method `prepare(cls, **options)`, which gets the
options of the yaml. It is called at the start of the run, and in the process from which those of episodes are forked.

Tools that are known only once the class has its options are no methods. A class with such tools has two others:

    def describe_tools(self) -> list[dict]: ...         # their JSON schemas; asked of one object, which is not reset
    def call_tool(self, name: str, arguments: dict): ...

A game of several players, all of which are the policy, is a class as those of TextArena:

    class Nim:
        players = 2
        def reset(self, **row): ...                         # begins a game; returns None
        def get_observation(self): ...                      # (player, a text or messages): whose turn it is, from 0
        def step(self, action: str): ...                    # (done, info)
        def get_rewards(self) -> list[float]: ...           # of each player, when the game has ended

In the place of a class, a function `async def run(data, base_url, api_key)` is an agent, which plays an episode by
itself. It gets the row, asks the policy by OpenAI's API, and returns the reward of the episode or None. An agent that
loads something first is a class with this method `run` in the place of `reset`; with `workers=process` its object is
built once, and each episode has a copy of it.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from rft.data.tool_calls import Schema
from rft.errors import build_each
from rft.registry import Target
from rft.rollout.environment.hosted import is_agent

DYNAMIC = ("describe_tools", "call_tool")  # methods of a class whose tools are no methods
GAME = ("get_observation", "step", "get_rewards")  # methods of a game of several players
RESERVED = ("reset", "get_reward", "close", *GAME, *DYNAMIC)  # public methods that are no tools
AGENT = ("data", "base_url", "api_key")  # parameters of a function that plays by itself
FIELD = "environment"  # of a row: the name of its environment


@dataclass(frozen=True)
class EnvironmentClass:
    """A class of environments with its options.

    Attributes:
        target: builds an environment of an episode.
        methods: the JSON schema of every tool that is a method, by its name.
        steps: it has Gymnasium's `step` in the place of tools.
        scores: it has `get_reward`, `get_rewards`, or `step`, whose rewards are added up.
        closes: it has `close`.
        plays: it is an agent, which plays an episode by itself.
        dynamic: its tools are no methods.
        players: of a game; 1 of any other class.
    """

    target: Target
    methods: dict[str, Schema]
    steps: bool
    scores: bool
    closes: bool
    plays: bool = False
    dynamic: bool = False
    players: int = 1

    @cached_property
    def tools(self) -> dict[str, Schema]:
        """The JSON schema of every tool, by its name. An object is built and asked once if they are no methods.

        Raises:
            ValueError: the object cannot be built or asked, or two tools have one name; names the key.
        """
        if not self.dynamic:
            return self.methods
        try:
            schemas = self.target.build().describe_tools()
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.target.key}: {error}") from error
        tools = {schema["function"]["name"]: schema for schema in schemas}
        if len(tools) < len(schemas):
            names = ", ".join(schema["function"]["name"] for schema in schemas)
            raise ValueError(f"{self.target.key}: two tools have one name ({names}); leave one of them out")
        return tools


def environment_class(node: Any, key: str) -> EnvironmentClass:
    """Reads the contract of the class that a yaml node names.

    Raises:
        ValueError: the class cannot be imported, lacks `reset`, has tools beside `step`, neither of them, or a tool
            without types or docstring; or a game lacks a method or the number of players; or the function has other
            parameters than those of an agent; names the key.
    """
    target = Target(node, key)
    if is_agent(target.factory):
        _check_agent(target.factory, key)
        return EnvironmentClass(target, {}, steps=False, scores=True, closes=False, plays=True)
    found = dict(inspect.getmembers(target.factory, inspect.isfunction))
    public = {name: method for name, method in found.items() if not name.startswith("_") and name not in RESERVED}
    name, steps, dynamic = target.factory.__name__, "step" in found, found.keys() >= {*DYNAMIC}
    if "reset" not in found:
        raise ValueError(f"{key}._target_: {name} has no method `reset(self, **row)`, which begins an episode; add it")
    if "get_observation" in found:
        return _game(target, found, public, key)
    if steps and public:
        raise ValueError(
            f"{key}._target_: {name} has `step` and tools ({', '.join(public)}); keep `step`, or the tools; the names "
            "of other methods begin with _"
        )
    if not steps and not public and not dynamic:
        raise ValueError(f"{key}._target_: {name} has neither tools, public methods with types, nor `step`; add one")
    tools = build_each(lambda tool, method: _schema(tool, method, key, name), public)
    return EnvironmentClass(
        target, tools, steps, scores=steps or "get_reward" in found, closes="close" in found, dynamic=dynamic
    )


def _game(target: Target, found: Mapping[str, Any], tools: Mapping[str, Any], key: str) -> EnvironmentClass:
    """A class with `get_observation`."""
    name, players = target.factory.__name__, dict(inspect.getmembers(target.factory)).get("players")
    missing = [method for method in GAME if method not in found]
    if missing or not isinstance(players, int) or players < 2:
        lacks = ", ".join(missing) or "players = 2, or more"
        raise ValueError(f"{key}._target_: {name} has get_observation, so it is a game, and lacks {lacks}; add it")
    if tools:
        raise ValueError(f"{key}._target_: the game {name} has tools ({', '.join(tools)}); begin their names with _")
    return EnvironmentClass(target, {}, steps=False, scores=True, closes="close" in found, players=players)


def _check_agent(function: Callable[..., Any], key: str) -> None:
    """Checks that a function, or the method `run` of a class, can be called with what an agent gets."""
    played = inspect.getattr_static(function, "run") if isinstance(function, type) else function
    parameters = inspect.signature(played).parameters.values()
    data = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY and p.name != "self"]
    if not {"base_url", "api_key"} <= {*data} <= {*AGENT}:
        raise ValueError(
            f"{key}._target_: {function.__name__}({', '.join(data)}) is no class, and no agent; name a class with the "
            f"method `reset`, or a function {function.__name__}({', '.join(AGENT)}), whose options stand behind a *"
        )


def _schema(tool: str, method: Any, key: str, name: str) -> Schema:
    try:
        schema: Schema = get_json_schema(method)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(
            f"{key}._target_: the tool {name}.{tool} has no schema ({error}); give it types and a Google docstring "
            "with each argument, or begin its name with _"
        ) from error
    return schema


def refuse_arguments(arguments: Mapping[str, Any], schema: Schema) -> str | None:
    """Why a tool cannot be called with these arguments; None if it can. Their types are the tool's own matter."""
    parameters = schema["function"]["parameters"]
    known, required = parameters["properties"], parameters.get("required", ())
    if unknown := [name for name in arguments if name not in known]:
        return f"it takes no argument {', '.join(unknown)} (it takes: {', '.join(known) or 'none'})"
    if missing := [name for name in required if name not in arguments]:
        return f"the argument {', '.join(missing)} is missing"
    return None


def checked_step(found: Any) -> tuple[Any, float, bool, bool]:
    """Observation, reward, terminated and truncated of what `step` returned.

    Raises:
        ValueError: it returned something else.
    """
    if not isinstance(found, tuple | list) or len(found) != 5:  # JSON has lists
        raise ValueError(
            f"step returned {found!r:.80}; it must return (observation, reward, terminated, truncated, info)"
        )
    observation, reward, terminated, truncated, _ = found
    return observation, checked_reward(reward), bool(terminated), bool(truncated)


def checked_reward(found: Any) -> float:
    """A reward as a finite number.

    Raises:
        ValueError: it is none.
    """
    if isinstance(found, bool | int | float) and math.isfinite(found):
        return float(found)
    raise ValueError(f"the reward is {found!r:.80}, not a finite number")
