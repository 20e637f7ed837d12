"""Tools of real MCP servers, over stdio and streamable HTTP."""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.tools import mcp_tools
from alignment.environments.tools.base import EpisodeContext
from alignment.environments.tools.mcp_tools import McpConnection, McpConnections, McpServer
from alignment.environments.tools.toolbox import Fault, Toolbox
from app.core.settings import REPOSITORY
from tests.support.scripted_engine import serve
from tests.support.tool_calls import EPISODE, assistant

pytest.importorskip("mcp", reason="the package mcp is not installed")

STDIO = McpServer(
    command=(sys.executable, "-m", "tests.support.mcp_server"), environment={"PYTHONPATH": str(REPOSITORY)}
)


@pytest.fixture
def http_server() -> Iterator[McpServer]:
    from tests.support.mcp_server import http_app

    with serve(http_app(), lifespan="on") as url:
        yield McpServer(url=f"{url}/mcp")


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> McpServer:
    server: McpServer = STDIO if request.param == "stdio" else request.getfixturevalue("http_server")
    return server


async def test_tools_of_a_server(server: McpServer) -> None:
    toolbox = Toolbox(await server.list_tools())
    assert [schema["function"]["name"] for schema in toolbox.schemas()][:2] == ["add", "count_calls"]
    async with toolbox.open(EPISODE) as tools:
        calls = assistant(("add", {"a": 2, "b": 3}), ("divide", {"a": 1, "b": 0}), ("add", {"a": "x", "b": 1}))
        added, divided, wrong = await tools.execute(calls)
        assert added["content"] == "5"
        assert divided["content"] == "Error: Error executing tool divide"
        assert wrong["content"] == "Error: a: 'x' is not of type 'integer'"
        assert [record.fault for record in tools.records] == [None, Fault.EXCEPTION, Fault.BAD_ARGUMENTS]


async def test_tools_of_an_episode_share_a_process_and_episodes_do_not() -> None:
    toolbox = Toolbox(await STDIO.list_tools())
    async with toolbox.open(EpisodeContext("one")) as one, toolbox.open(EpisodeContext("two")) as two:
        await one.execute(assistant(("add", {"a": 2, "b": 3})))
        [counted] = await one.execute(assistant(("count_calls", {})))
        assert counted["content"] == "1"
        [counted] = await two.execute(assistant(("count_calls", {})))
        assert counted["content"] == "0"


async def test_server_that_dies_is_a_failure_of_the_host() -> None:
    toolbox = Toolbox(await STDIO.list_tools())
    async with toolbox.open(EPISODE) as tools:
        for name in ("die", "add"):
            async with asyncio.timeout(30):
                with pytest.raises(InfrastructureFailure):
                    await tools.execute(assistant((name, {} if name == "die" else {"a": 1, "b": 2})))


@pytest.mark.parametrize(
    "server",
    [
        McpServer(command=("/does/not/exist",)),
        McpServer(command=(sys.executable, "-c", "pass")),
        McpServer(url="http://127.0.0.1:9/mcp"),
        McpServer(command=(sys.executable, "-c", "import time; time.sleep(60)"), connect_seconds=0.5),
    ],
    ids=["no command", "ends at once", "refuses", "says nothing"],
)
async def test_server_that_does_not_answer_is_a_failure_of_the_host(server: McpServer) -> None:
    with pytest.raises(InfrastructureFailure):
        await server.list_tools()


async def test_tools_that_are_called_at_once_share_the_connection_that_fails() -> None:
    toolbox = Toolbox(await STDIO.list_tools())
    async with toolbox.open(EPISODE) as tools:
        await tools.execute(assistant(("add", {"a": 1, "b": 2}), ("count_calls", {}), ("divide", {"a": 1, "b": 2})))
        assert [record.fault for record in tools.records] == [None, None, None]
    connections = McpConnections(McpServer(command=("/does/not/exist",)))
    results = await asyncio.gather(*(connections.acquire("ep-1") for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [InfrastructureFailure] * 3
    with pytest.raises(InfrastructureFailure):
        await connections.acquire("ep-1")


async def test_process_has_no_variables_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "SECRET_KEY", "secret")
    server = McpServer(
        command=STDIO.command, environment=STDIO.environment, only=frozenset({"read_variable"}), prefix="host_"
    )
    async with Toolbox(await server.list_tools()).open(EPISODE) as tools:
        calls = assistant(("host_read_variable", {"name": "SECRET_KEY"}), ("host_read_variable", {"name": "PATH"}))
        secret, path = await tools.execute(calls)
        assert (secret["content"], bool(path["content"])) == ("", True)


def test_server_has_a_command_or_a_url() -> None:
    for options in ({}, {"command": ("a",), "url": "http://a"}):
        with pytest.raises(ValueError, match="either a command or a url"):
            McpServer(**options)  # type: ignore[arg-type]


def silent(*methods: str, answer_seconds: float = 30.0) -> McpServer:
    command = (sys.executable, "-m", "tests.support.silent_mcp_server", *methods)
    return McpServer(command=command, environment={"PYTHONPATH": str(REPOSITORY)}, answer_seconds=answer_seconds)


async def test_all_pages_of_tools_are_listed() -> None:
    tools = await silent().list_tools()
    assert [tool.name for tool in tools] == ["first", "second"]
    async with Toolbox(tools).open(EPISODE) as episode:
        assert [message["content"] for message in await episode.execute(assistant(("second", {})))] == ["done"]


async def test_server_that_stops_answering_is_a_failure_of_the_host() -> None:
    async with asyncio.timeout(60):
        with pytest.raises(InfrastructureFailure, match="lists no tools: TimeoutError"):
            await silent("tools/list", answer_seconds=0.5).list_tools()
        async with Toolbox(await silent("tools/call", answer_seconds=5.0).list_tools()).open(EPISODE) as tools:
            with pytest.raises(InfrastructureFailure, match="does not answer: TimeoutError"):
                await tools.execute(assistant(("first", {})))


async def test_close_gives_up_a_connection_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "CLOSE_SECONDS", 0.1)
    hold = asyncio.Event()

    async def stubborn() -> None:
        while not hold.is_set():
            with suppress(asyncio.CancelledError):
                await hold.wait()

    connection = McpConnection(STDIO)
    connection._task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await connection.close()
    hold.set()
    await connection._task
