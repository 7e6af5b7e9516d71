"""Tools and interactions that are written for verl, named by verl's configuration files.

The package `verl` is needed for tools, whose schemas are objects of it; interactions need what their modules import.
"""

import asyncio
import inspect
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any
from uuid import uuid4

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rft.errors import did_you_mean, naming
from rft.imports import import_named
from rft.remote.event_loop import EventLoop


@dataclass(frozen=True)
class Shared:
    """The objects of a configuration file, in the order of the file.

    As in verl there is one object for all episodes of a process, which tells them apart by an instance id. They run in
    one event loop that is never closed, because connections and locks stay bound to the loop that has opened them.
    """

    objects: list[tuple[str, Any]]
    loop: EventLoop

    def named(self, name: str) -> Any:
        """The object of a name that there is."""
        return dict(self.objects)[name]


class VerlTools:
    """An environment whose tools are those of a tool configuration of verl (`tool_config_path`).

    A tool that is called has one instance for each episode: `create` before its first call, `calc_reward` and `release`
    after the episode. Arguments come from the row's `tools_kwargs`, which may be in `extra_info`.

    Args:
        tools: the file, `tools: [{class_name, config, tool_schema}]`.

    Raises:
        ValueError: the package is missing, the file or a class cannot be read, or a tool needs what there is not here.
    """

    @classmethod
    def prepare(cls, *, tools: str) -> None:
        """Imports verl and the classes of the tools, which takes seconds. Raises as the constructor."""
        _schema_class()
        _classes(tools, "tools")

    def __init__(self, *, tools: str) -> None:
        self._shared = _tools(tools)
        self._given: dict[str, Any] = {}
        self._created: dict[str, asyncio.Future[str]] = {}  # ids of instances, by the names of tools
        self._instances: dict[str, str] = {}  # those that are created
        self._rewards: list[float] = []
        self._refused = ""

    def describe_tools(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools, as verl gives them to the chat template."""
        nothing, schemas = {"type": "object", "properties": {}}, []
        for _, tool in self._shared.objects:
            schema = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
            schemas.append({**schema, "function": {"parameters": nothing, **schema["function"]}})
        return schemas

    def reset(self, **row: Any) -> None:
        """Takes the arguments of the row; adds nothing to the prompt.

        Raises:
            ValueError: the row selects tools.
        """
        if (row.get("extra_info") or {}).get("tool_selection"):
            raise ValueError("extra_info.tool_selection is not supported: all rows have all tools; remove the field")
        self._given = _of_row(row, "tools_kwargs")

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a tool's response.

        Raises:
            ValueError: the response has media.
        """
        return self._shared.loop.run(self._execute(name, arguments))

    def get_reward(self) -> float:
        """The rewards of all calls, and of `calc_reward` of each tool that was called if it returns a number."""
        return self._shared.loop.run(self._score())

    def close(self) -> None:
        """Releases the instances.

        Raises:
            RuntimeError: a response had media, so that the episode says nothing about the policy.
        """
        self._shared.loop.run(self._release())
        if self._refused:
            raise RuntimeError(self._refused)

    async def _execute(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in self._created:  # calls of one answer run at the same time
            self._created[name] = asyncio.ensure_future(self._create(name))
        instance = await self._created[name]
        tool = self._shared.named(name)
        response, reward, _ = await tool.execute(instance, arguments, **self._options(name, "execute_kwargs"))
        self._rewards.append(0.0 if reward is None else float(reward))
        if isinstance(response, str):  # of tools that are older than ToolResponse
            return response
        if not response.is_empty() and not response.is_text_only():
            self._refused = f"the tool {name} returned media, which dialogues do not have"
            raise ValueError(self._refused)
        return response.text or ""

    async def _create(self, name: str) -> str:
        options = self._options(name, "create_kwargs")
        # The SGLang rollout of verl 0.6 gives the arguments by their names, the agent loop as one mapping; a tool takes
        # what it knows, since `create` has **kwargs.
        made = await self._shared.named(name).create(create_kwargs=options, **options)
        instance: str = made if isinstance(made, str) else made[0]
        self._instances[name] = instance
        return instance

    async def _score(self) -> float:
        total = sum(self._rewards)
        for name, instance in self._instances.items():
            options = self._options(name, "calc_reward_kwargs")
            reward = await self._shared.named(name).calc_reward(instance, **options)
            total += float(reward) if isinstance(reward, Real) else 0.0
        return total

    async def _release(self) -> None:
        for name, instance in self._instances.items():
            await self._shared.named(name).release(instance, **self._options(name, "release_kwargs"))

    def _options(self, name: str, method: str) -> dict[str, Any]:
        return (self._given.get(name) or {}).get(method) or {}  # tables have null in the place of a missing field


def _of_row(row: dict[str, Any], field: str) -> dict[str, Any]:
    return row.get(field) or (row.get("extra_info") or {}).get(field) or {}


def _schema_class() -> Any:
    try:
        from verl.tools.schemas import OpenAIFunctionToolSchema
    except ImportError as error:
        raise ValueError(f"the package verl cannot be imported ({error}); install it: pip install verl") from error
    return OpenAIFunctionToolSchema


@cache
def _tools(path: str) -> Shared:
    schema_class, objects = _schema_class(), []
    for where, entry, kind in _classes(path, "tools"):
        config = entry.get("config") or {}
        if config.get("type", "native") != "native":
            raise ValueError(
                f"{where}.config.type={config['type']}: only native tools are supported; tools of MCP servers are "
                "environment=mcp"
            )
        schema = entry.get("tool_schema")  # None: the class has one
        try:
            schema = schema and schema_class.model_validate(schema)
        except ValueError as error:
            raise ValueError(f"{where}.tool_schema: {' '.join(str(error).split())}") from error
        with naming(f"{where}.class_name={entry['class_name']}", kind):
            tool = kind(config=config, tool_schema=schema)
        if "agent_data" in inspect.signature(tool.execute).parameters:
            raise ValueError(
                f"{where}: {entry['class_name']}.execute takes agent_data, the state of verl's agent loop, which there "
                "is not here; keep the state by instance_id"
            )
        objects.append((tool.name, tool))
    return Shared(objects, EventLoop("verl"))


def _classes(path: str, section: str) -> list[tuple[str, dict[str, Any], Any]]:
    """The place of each entry of a file, for messages, the entry, and its class."""
    try:
        file = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"{path} cannot be read ({error}); name a configuration file of verl") from error
    entries = file.get(section) if isinstance(file, dict) else None
    listed = isinstance(entries, list) and all(isinstance(entry, dict) and "class_name" in entry for entry in entries)
    if not entries or not listed:
        raise ValueError(f"{path}: expected `{section}:` with a list of {{class_name: module.Class, config: ...}}")
    classes = []
    for number, entry in enumerate(entries):
        where = f"{path}: {section}[{number}]"
        module, _, name = entry["class_name"].rpartition(".")
        classes.append((where, entry, import_named(module, name, f"{where}.class_name={module}.{name}", "class")))
    return classes


class VerlInteraction:
    """An environment that is an interaction of verl (`interaction_config_path`), which answers as the user does.

    Arguments come from the row's `interaction_kwargs`, which may be in `extra_info`; of several interactions it names
    one, `{name: ...}`.

    Args:
        interactions: the file, `interaction: [{name, class_name, config}]`.

    Raises:
        ValueError: the file or a class cannot be read, or two interactions have one name.
    """

    @classmethod
    def prepare(cls, *, interactions: str) -> None:
        """Imports the classes of the interactions. Raises as the constructor."""
        _classes(interactions, "interaction")

    def __init__(self, *, interactions: str) -> None:
        self._shared = _interactions(interactions)
        self._instance = uuid4().hex
        self._given: dict[str, Any] = {}
        self._messages: list[dict[str, Any]] = []
        self._interaction: Any = None

    def reset(self, *, prompt: Any, **row: Any) -> None:
        """Starts the interaction; adds nothing to the prompt.

        Raises:
            ValueError: the row names no interaction.
        """
        self._given = _of_row(row, "interaction_kwargs")
        names = [name for name, _ in self._shared.objects]
        name = self._given.get("name", names[0] if len(names) == 1 else None)
        if name not in names:
            raise ValueError(
                f"interaction_kwargs.name is {name!r}, none of the interactions, which are {', '.join(names)}"
                f"{did_you_mean(str(name), names)}"
            )
        interaction = self._shared.named(name)
        self._shared.loop.run(interaction.start_interaction(self._instance, **self._given))
        self._interaction = interaction
        self._messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Gymnasium's tuple of what `generate_response` returns to the messages so far."""
        self._messages.append({"role": "assistant", "content": action})
        work = self._interaction.generate_response(self._instance, self._messages, **self._given)
        ended, response, reward, _ = self._shared.loop.run(work)
        self._messages.append({"role": "user", "content": response})
        return response, 0.0 if reward is None else float(reward), bool(ended), False, {}

    def close(self) -> None:
        """Ends the interaction."""
        if self._interaction is not None:
            finalize = self._interaction.finalize_interaction
            # The base class takes no instance id; the interactions of verl do.
            self._shared.loop.run(finalize(*[self._instance] if inspect.signature(finalize).parameters else []))


@cache
def _interactions(path: str) -> Shared:
    objects: dict[str, Any] = {}
    for where, entry, kind in _classes(path, "interaction"):
        class_name = entry["class_name"].rpartition(".")[2]
        name = entry.get("name") or (class_name.removesuffix("Interaction") or class_name).lower()
        if name in objects:
            raise ValueError(f"{path}: two interactions have the name {name!r}; give one of them another `name`")
        config = {**(entry.get("config") or {}), "name": name}
        with naming(f"{where}.class_name={entry['class_name']}", kind):
            objects[name] = kind(config=config)
    return Shared(list(objects.items()), EventLoop("verl"))
