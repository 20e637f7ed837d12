"""StreamFanout: choices start in order, whichever engine request is the fastest."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self, cast

from app.chat.fanout import StreamFanout
from app.inference.engine import EngineClient
from app.inference.request import ChatCall


class DelayedStream:
    """A stream of three chunks, the first after `delay` seconds."""

    capture_or_none = None

    def __init__(self, delay: float) -> None:
        self.delay = delay

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        await asyncio.sleep(self.delay)
        for text in ("a", "b", "c"):
            yield {"choices": [{"index": 0, "delta": {"content": text}}]}
        yield {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


class Client:
    def stream(self, call: Any) -> DelayedStream:
        return DelayedStream(call)


async def test_chunks_start_in_choice_order() -> None:
    client, delays = cast(EngineClient, Client()), cast(list[ChatCall], [0.1, 0.05, 0.0])
    fanout = StreamFanout(client, delays)
    fanout.start()
    await fanout.wait_until_started()
    received = [chunk async for chunk in fanout]
    await fanout.close()
    indices = [chunk["choices"][0]["index"] for chunk in received[:-1]]
    assert [index for at, index in enumerate(indices) if index not in indices[:at]] == [0, 1, 2]
    for index in range(3):
        texts = [
            chunk["choices"][0]["delta"]["content"] for chunk in received[:-1] if chunk["choices"][0]["index"] == index
        ]
        assert texts == ["a", "b", "c"]
    assert received[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
