"""What is asked again: after which pause, and how its failure is put on record."""

from collections.abc import Awaitable
from logging import Logger

FIRST_PAUSE = 5.0  # seconds until the second attempt
GROWTH = 4.0
LONGEST_PAUSE = 600.0
LONGEST_TEXT = 1000


def pause(attempt: int) -> float:
    """Seconds until the next attempt, after so many. Example: 5, 20, 80, 320, 600, 600 …"""
    return min(FIRST_PAUSE * GROWTH ** (attempt - 1), LONGEST_PAUSE)


async def spared(work: Awaitable[int], log: Logger, told: str, *of: str) -> int:
    """What came of it; 0, and a word in the log, when it failed: the misfortune of one is not the others'."""
    try:
        return await work
    except Exception:
        log.exception(told, *of)
        return 0


def plain(text: str) -> str:
    """What a database can hold, and not too much of it."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()[:LONGEST_TEXT]
