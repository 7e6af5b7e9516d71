"""A server of MCP with tools of every kind: `python mcp_server.py` on standard streams, or with a port on HTTP."""

import os
import sys

from mcp.server import MCPServer

server = MCPServer("numbers", log_level="ERROR")
total = 0


@server.tool()
def add(number: int, method: str = "plus") -> int:
    """Adds a number to the total of this process and returns it.

    Args:
        number: what is added.
        method: a name that a method of Python would collide with.
    """
    global total
    total += number
    return total


@server.tool()
def close() -> str:
    """A tool with the name of a method of environments."""
    return "closed nothing"


@server.tool()
def fails() -> str:
    """Raises an error."""
    raise ValueError("by zero")


@server.tool()
def dies() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
async def hangs() -> str:
    """Takes long."""
    import anyio

    await anyio.sleep(60)
    return "late"


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
