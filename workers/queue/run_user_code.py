"""Somebody's own function, run in a thread for a limited time: whatever it raises is its own failure."""

import asyncio
from collections.abc import Callable
from typing import Any


class Failed(Exception):
    """It raised, or took too long. A thread cannot be ended: what hangs goes on hanging until the process ends."""


async def run(
    function: Callable[[], Any], seconds: float, *, noun: str, passes: tuple[type[Exception], ...] = ()
) -> Any:
    """Raises Failed, and what `passes` through."""

    def call() -> Any:
        try:
            return function()
        except passes:
            raise
        except (Exception, SystemExit) as error:
            raise Failed(f"{type(error).__name__}: {error}") from error

    try:
        async with asyncio.timeout(seconds):
            return await asyncio.to_thread(call)
    except TimeoutError as error:
        raise Failed(f"the {noun} took more than {seconds:g} s") from error
