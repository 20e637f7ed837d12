"""For tests that demand something of the demo model: a tool, a schema filled in, an end in time.

Within a demanded call's grammar SGLang lets any white space pass, and a model of two million parameters gets lost in it
once in some fifty replies; a sampled reply may also ramble on, or be over before anybody could break it off. It ends
otherwise then, as it should, and shows nothing of what a test is about.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

TRIES = 4


def again(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test up to four times; a failure of the last attempt fails the test."""
    if inspect.iscoroutinefunction(test):

        @functools.wraps(test)
        async def run_with_retries_async(**kwargs: Any) -> None:
            for left in reversed(range(TRIES)):
                try:
                    return await test(**kwargs)
                except asyncio.CancelledError:
                    raise
                except Exception:
                    if not left:
                        raise

        return run_with_retries_async

    @functools.wraps(test)
    def run_with_retries(**kwargs: Any) -> None:
        for left in reversed(range(TRIES)):
            try:
                return test(**kwargs)
            except Exception:
                if not left:
                    raise

    return run_with_retries
