"""A client that hangs up while its reply is generated."""

import asyncio
from typing import Any

import httpx2

from tests.support.scripted_engine import ScriptedEngine


async def hang_up(
    client: httpx2.AsyncClient, scripted: ScriptedEngine, path: str, body: dict[str, Any], mark: str | None
) -> None:
    """Send a request, and close the connection while the engine writes a long reply.

    `mark`: of a streamed request, in the first line that has text; None for one that is not streamed.
    """
    scripted.seconds_per_token, scripted.reply_text = 0.05, "word " * 500
    if mark is not None:
        async with client.stream("POST", path, json=body | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if mark in line:
                    return
    task = asyncio.create_task(client.post(path, json=body, timeout=60))
    while not any(reply.output_ids for reply in list(scripted.running.values())):
        await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait([task])
