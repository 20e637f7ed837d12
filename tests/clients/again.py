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
    """Up to four tries; the last one's failure is the test's."""
    if inspect.iscoroutinefunction(test):

        @functools.wraps(test)
        async def tried_async(**given: Any) -> None:
            for left in reversed(range(TRIES)):
                try:
                    return await test(**given)
                except asyncio.CancelledError:
                    raise
                except Exception:
                    if not left:
                        raise

        return tried_async

    @functools.wraps(test)
    def tried(**given: Any) -> None:
        for left in reversed(range(TRIES)):
            try:
                return test(**given)
            except Exception:
                if not left:
                    raise

    return tried
