"""An MCP server: `python -m tests.support.mcp_server` speaks over stdio, `http_app()` over streamable HTTP."""

import os
from typing import Any

from mcp.server.mcpserver import MCPServer

server = MCPServer("arithmetic")
calls: list[int] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    calls.append(a + b)
    return a + b


@server.tool()
def count_calls() -> int:
    """Return how many sums this process has computed."""
    return len(calls)


@server.tool()
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


@server.tool()
def die() -> str:
    """End the server's process."""
    os._exit(1)


@server.tool()
def read_variable(name: str) -> str:
    """Return an environment variable, or an empty text."""
    return os.environ.get(name, "")


def http_app() -> Any:
    return server.streamable_http_app()


if __name__ == "__main__":
    server.run("stdio")
