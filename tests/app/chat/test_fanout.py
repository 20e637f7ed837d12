"""Choices side by side: they begin in order, whichever engine request was the quickest."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self

from app.chat.fanout import StreamFanout


class Paced:
    """A stream that says three words, the first after `delay` seconds."""

    captured = None

    def __init__(self, delay: float) -> None:
        self.delay = delay

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        await asyncio.sleep(self.delay)
        for word in ("a", "b", "c"):
            yield {"choices": [{"index": 0, "delta": {"content": word}}]}
        yield {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


class Client:
    def stream(self, call: Any) -> Paced:
        return Paced(call)


async def test_the_slowest_choice_may_be_the_first() -> None:
    choices = StreamFanout(Client(), [0.1, 0.05, 0.0])  # type: ignore[arg-type]
    choices.start()
    await choices.begun()
    came = [chunk async for chunk in choices]
    await choices.leave()
    indices = [chunk["choices"][0]["index"] for chunk in came[:-1]]
    assert [index for at, index in enumerate(indices) if index not in indices[:at]] == [0, 1, 2]
    for index in range(3):
        words = [
            chunk["choices"][0]["delta"]["content"] for chunk in came[:-1] if chunk["choices"][0]["index"] == index
        ]
        assert words == ["a", "b", "c"]
    assert came[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
