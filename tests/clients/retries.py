"""Retries for tests that need the demo model to call a tool, to fill in a schema, or to end in time.

A sampled reply may be too long, or end before a client can interrupt it. Such a reply is correct, but does not show
what the test is about.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

TRIES = 4


def with_retries(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test up to four times; a failure of the last attempt fails the test."""
    if inspect.iscoroutinefunction(test):

        @functools.wraps(test)
        async def run_async(**kwargs: Any) -> None:
            for _ in range(TRIES - 1):
                try:
                    return await test(**kwargs)
                except Exception:
                    continue
            return await test(**kwargs)

        return run_async

    @functools.wraps(test)
    def run(**kwargs: Any) -> None:
        for _ in range(TRIES - 1):
            try:
                return test(**kwargs)
            except Exception:
                continue
        return test(**kwargs)

    return run
