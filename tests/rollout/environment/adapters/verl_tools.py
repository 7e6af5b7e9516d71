"""Tools and interactions by verl's contract, beside those that verl brings."""

import asyncio

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

EVENTS = []


class Counter(BaseTool):
    """Counts calls of an instance, and keeps its arguments as verl up to 0.6 gives them."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self._counts = {}

    async def create(self, instance_id=None, start=0, **kwargs):
        await asyncio.sleep(0.02)  # so that calls of one answer meet
        instance_id = instance_id or f"i{len(EVENTS)}"
        EVENTS.append(("create", start, kwargs))
        self._counts[instance_id] = start
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, by=1, **kwargs):
        self._counts[instance_id] += by
        return ToolResponse(text=f"{self.config['unit']} {self._counts[instance_id]}"), None, {}

    async def calc_reward(self, instance_id, **kwargs):
        return [str(self._counts[instance_id])]  # no number, as that of verl's search tool

    async def release(self, instance_id, **kwargs):
        EVENTS.append(("release", self._counts.pop(instance_id)))


class Draws(Counter):
    """Returns an image."""

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="here", image=["picture"]), 0.0, {}


class ReadsLoop(BaseTool):
    """Reads the state of verl's agent loop."""

    async def execute(self, instance_id, parameters, agent_data, **kwargs):
        return ToolResponse(text=str(agent_data.messages)), 0.0, {}


class Broken(BaseTool):
    """Cannot be built."""

    def __init__(self, config, tool_schema):
        raise KeyError("url")
