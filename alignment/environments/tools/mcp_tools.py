"""Tools of MCP servers, over stdio or streamable HTTP. Needs the package `mcp`.

Each episode has a connection of its own, which its tools of one server share: over stdio that is a process of its own.

Example:
    server = McpServer(command=("python", "-m", "my_server"))
    toolbox = Toolbox(await server.list_tools())
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from alignment.environments.errors import InfrastructureFailure, ToolError, describe_error
from alignment.environments.http_client import ANSWER_SECONDS, open_client
from alignment.environments.tools.base import EpisodeContext, JsonObject, Tool, ToolResult

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as RemoteTool

log = logging.getLogger(__name__)

INVALID_PARAMS = -32602  # JSON-RPC's code for arguments that the server does not accept
CLOSE_SECONDS = 10.0  # until a connection is given up
INSTALL = "tools of MCP servers need the package mcp: pip install mcp"


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """How to reach a server: a command for stdio, or the URL of streamable HTTP.

    A command gets the variables of `environment` and a few such as PATH, no others. `only` selects tools by name, and
    `prefix` goes before the names, so that two servers can have tools of one name. `headers` may hold keys. No answer
    to a call within `answer_seconds` is a failure of the host.
    """

    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    only: frozenset[str] | None = None
    prefix: str = ""
    connect_seconds: float = 30.0
    answer_seconds: float = ANSWER_SECONDS

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("an MCP server has either a command or a url")

    async def list_tools(self) -> list[McpTool]:
        """Return the server's tools. Raises InfrastructureFailure if it does not answer."""
        connection = McpConnection(self)
        await connection.open()
        try:
            async with asyncio.timeout(self.answer_seconds):
                listed = await _list_pages(connection.client)
        except Exception as error:
            raise InfrastructureFailure(f"the MCP server lists no tools: {describe_error(error)}") from error
        finally:
            await connection.close()
        connections = McpConnections(self)
        return [
            McpTool(connections, tool.name, f"{self.prefix}{tool.name}", tool.description or "", tool.input_schema)
            for tool in listed
            if self.only is None or tool.name in self.only
        ]


async def _list_pages(client: Client) -> list[RemoteTool]:
    tools: list[RemoteTool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


class McpConnection:
    """A connection to a server, in a task of its own: its context must be left by the task that entered it."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._client: Client | None = None
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self.num_users = 0

    @property
    def client(self) -> Client:
        if self._client is None or self._task is None or self._task.done():
            raise InfrastructureFailure("the connection to the MCP server was lost")
        return self._client

    async def open(self) -> None:
        """Connect, if that has not been tried. Raises InfrastructureFailure, also where it has failed before."""
        async with self._lock:
            if self._task is None:
                await self._start()
        _ = self.client  # raises if there is none

    async def _start(self) -> None:
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(opened))
        try:
            async with asyncio.timeout(self._server.connect_seconds):
                await asyncio.shield(opened)
        except Exception as error:
            await self.close()
            raise InfrastructureFailure(f"no connection to the MCP server: {describe_error(error)}") from error

    async def close(self) -> None:
        """End the connection, and the server's process if there is one."""
        self._closing.set()
        if self._task is not None:
            if self._client is None:
                self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
            if not self._task.done():
                log.warning("mcp_close_failed", extra={"seconds": CLOSE_SECONDS})
                self._task.cancel()
                await asyncio.wait([self._task], timeout=CLOSE_SECONDS)

    async def _run(self, opened: asyncio.Future[None]) -> None:
        try:
            async with AsyncExitStack() as stack:
                self._client = await self._connect(stack)
                opened.set_result(None)
                await self._closing.wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)
        finally:
            opened.cancel()

    async def _connect(self, stack: AsyncExitStack) -> Client:
        try:
            import mcp
            from mcp.client.streamable_http import streamable_http_client
        except ImportError as error:
            raise InfrastructureFailure(INSTALL) from error
        if self._server.url is None:
            command, *arguments = self._server.command
            parameters = mcp.StdioServerParameters(
                command=command, args=arguments, env=dict(self._server.environment) or None
            )
            return await stack.enter_async_context(mcp.Client(parameters))
        http = await stack.enter_async_context(open_client(self._server.headers))
        return await stack.enter_async_context(mcp.Client(streamable_http_client(self._server.url, http_client=http)))


class McpConnections:
    """The connections of a server by episode. One is open as long as a tool uses it."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self._by_episode: dict[str, McpConnection] = {}

    async def acquire(self, episode_id: str) -> McpConnection:
        """Return the episode's connection, which the first of its tools opens. Raises InfrastructureFailure."""
        connection = self._by_episode.setdefault(episode_id, McpConnection(self.server))
        connection.num_users += 1
        try:
            await connection.open()
        except BaseException:
            await self.release(episode_id)
            raise
        return connection

    async def release(self, episode_id: str) -> None:
        connection = self._by_episode[episode_id]
        connection.num_users -= 1
        if connection.num_users == 0:
            del self._by_episode[episode_id]
            await connection.close()


@dataclass(frozen=True)
class McpState:
    episode_id: str
    connection: McpConnection


class McpTool(Tool[McpState]):
    """A tool of a server. A result that the server marks as an error is shown to the model."""

    has_own_time_limit = True

    def __init__(
        self, connections: McpConnections, remote_name: str, name: str, description: str, parameters: JsonObject
    ) -> None:
        self._connections = connections
        self._seconds = connections.server.answer_seconds
        self._remote_name = remote_name
        self.name = name
        self.description = description
        self.parameters = parameters

    async def create(self, episode: EpisodeContext) -> McpState:
        return McpState(episode.id, await self._connections.acquire(episode.id))

    async def execute(self, state: McpState, arguments: JsonObject) -> ToolResult:
        from mcp import MCPError

        try:
            async with asyncio.timeout(self._seconds):
                result = await state.connection.client.call_tool(self._remote_name, arguments)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message) from error
            raise InfrastructureFailure(f"the MCP server failed: {describe_error(error)}") from error
        except Exception as error:
            raise InfrastructureFailure(f"the MCP server does not answer: {describe_error(error)}") from error
        text = _content_text(result)
        if result.is_error:
            raise ToolError(text or "the tool reports an error without a message")
        return ToolResult(text)

    async def release(self, state: McpState) -> None:
        await self._connections.release(state.episode_id)


def _content_text(result: CallToolResult) -> str:
    """Return the texts of the content. Other parts, such as images, are named."""
    return "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
