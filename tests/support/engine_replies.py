"""The two ways to generate a reply with an engine's client, for tests of both."""

from collections.abc import Awaitable, Callable

import pytest

from app.inference.capture import Capture
from app.inference.chat_format import ChatChunk
from app.inference.engine import EngineClient
from app.inference.request import ChatCall

MakeCall = Callable[..., ChatCall]
GetCapture = Callable[[EngineClient, ChatCall], Awaitable[Capture]]


async def read_stream(client: EngineClient, call: ChatCall) -> tuple[list[ChatChunk], Capture]:
    """Return the chunks and the capture of a streamed reply."""
    async with client.stream(call) as stream:
        chunks = [chunk async for chunk in stream]
    assert stream.capture is not None
    return chunks, stream.capture


async def capture_stream(client: EngineClient, call: ChatCall) -> Capture:
    """Return the capture of a streamed reply, after checking that the chunks contain its text."""
    chunks, capture = await read_stream(client, call)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == capture.text
    return capture


async def capture_completion(client: EngineClient, call: ChatCall) -> Capture:
    """Return the capture of a whole reply."""
    return (await client.complete(call)).capture


both_modes = pytest.mark.parametrize("get_capture", [capture_stream, capture_completion], ids=["stream", "complete"])
