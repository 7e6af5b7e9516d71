"""Tools of servers of the Model Context Protocol (MCP). The package `mcp` is an extra."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from rft.imports import require_package
from rft.ranges import Seconds


@dataclass(frozen=True)
class Server:
    """A server: a program to start, which talks over its standard streams, or one that runs already.

    Attributes:
        command, args: the program and its arguments.
        env: its environment variables, beside HOME, LOGNAME, PATH, SHELL, TERM and USER of the run.
        cwd: the folder in which it runs; None: that of the run.
        url: of a server that speaks streamable HTTP, in the place of `command`.
        headers: of each HTTP request.
    """

    command: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def transport(self) -> Any:
        """What the client of the package connects to."""
        from mcp.client.stdio import StdioServerParameters
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        if self.url is not None:
            return streamable_http_client(self.url, http_client=create_mcp_http_client(headers=self.headers))
        return StdioServerParameters(command=self.command, args=self.args, env=self.env, cwd=self.cwd)


class Mcp:
    """An environment whose tools are those of MCP servers. Each episode starts its programs, and opens its sessions.

    Args:
        servers: by names of the user's choice.
        request_s: seconds of one request to a server: its start, the list of its tools, or a call.

    Raises:
        ValueError: the package is missing, there is no server, or one has not exactly one of `command` and `url`.
    """

    def __init__(self, *, servers: dict[str, Server], request_s: Seconds) -> None:
        require_package("mcp", "the package mcp is not installed; pip install 'rft[mcp]'")
        if not servers:
            raise ValueError("servers is empty; name one, {search: {command: ..., args: [...]}}")
        for name, server in servers.items():
            if (server.command is None) == (server.url is None):
                raise ValueError(f"servers.{name}: set command, of a program to start, or url, and not both")
        self._servers = servers
        self._request_s = request_s
        self._opened = ExitStack()  # what `close` ends
        self._portal: Any = None  # runs coroutines in an event loop of its own, which this episode alone has
        self._client_of: dict[str, Any] = {}  # by the names of tools
        self._lost = ""

    def describe_tools(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools of all servers, which are started and ended for it.

        Raises:
            ValueError: a server does not start or answer; names it.
        """
        with self._opened:
            return self._open()

    def reset(self, **row: Any) -> None:
        """Starts the servers; adds nothing to the prompt. Raises as `describe_tools`."""
        self._open()

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a tool's result, a line for each block of text.

        Raises:
            RuntimeError: the tool reports an error.
            MCPError: the server has ended, refuses the call or takes too long.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = self._portal.call(self._client_of[name].call_tool, name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self._lost = name
            raise
        text = "\n".join(block.text for block in result.content if block.type == "text")
        if result.is_error:
            raise RuntimeError(text)
        return text

    def close(self) -> None:
        """Ends the sessions, and the programs that `reset` has started.

        Raises:
            RuntimeError: a server ended before, so that the episode says nothing about the policy.
        """
        self._opened.close()
        if self._lost:
            raise RuntimeError(f"the server with the tool {self._lost} ended in the episode")

    def _open(self) -> list[dict[str, Any]]:
        from anyio.from_thread import start_blocking_portal
        from mcp import Client, MCPError

        self._portal = self._opened.enter_context(start_blocking_portal())
        schemas = []
        for name, server in self._servers.items():
            client = Client(server.transport(), read_timeout_seconds=self._request_s)
            try:
                self._opened.enter_context(self._portal.wrap_async_context_manager(client))
                tools = self._portal.call(_listed, client)
            except (OSError, MCPError, ExceptionGroup) as error:
                raise ValueError(f"servers.{name} does not answer: {_spelt(error)}") from error
            self._client_of |= dict.fromkeys((tool.name for tool in tools), client)
            schemas += [_schema(tool) for tool in tools]
        return schemas


async def _listed(client: Any) -> list[Any]:
    """All tools of a server, which may list them in several parts."""
    found = await client.list_tools()
    tools = list(found.tools)
    while found.next_cursor is not None:
        found = await client.list_tools(cursor=found.next_cursor)
        tools += found.tools
    return tools


def _schema(tool: Any) -> dict[str, Any]:
    parameters = {"properties": {}, **tool.input_schema}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": parameters},
    }


def _spelt(error: Exception) -> str:
    """The first error of a group, which task groups raise."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
