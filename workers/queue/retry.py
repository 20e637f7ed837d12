"""Retries: the delay before the next attempt, transactions that met a conflict, and failures that are only logged."""

from collections.abc import Awaitable, Callable
from logging import Logger

from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database

FIRST_DELAY_SECONDS = 5.0
DELAY_GROWTH = 4.0
MAX_DELAY_SECONDS = 600.0
MAX_REASON_LENGTH = 1000
TRANSACTION_ATTEMPTS = 3


def backoff(attempt: int) -> float:
    """Return the seconds to wait after `attempt` failed attempts. Example: 5, 20, 80, 320, 600, 600 …"""
    return min(FIRST_DELAY_SECONDS * DELAY_GROWTH ** (attempt - 1), MAX_DELAY_SECONDS)


async def log_and_continue(work: Awaitable[int], log: Logger, message: str, *args: str) -> int:
    """Return the result of `work`, or log `message` with the traceback and return 0 when it raises an exception."""
    try:
        return await work
    except Exception:
        log.exception(message, *args)
        return 0


async def write_with_retries(db: Database, write: Callable[[AsyncSession], Awaitable[None]]) -> None:
    """Run `write` in a transaction, and again in a new one when it conflicts with another transaction."""
    for attempts_left in range(TRANSACTION_ATTEMPTS - 1, -1, -1):
        try:
            async with db.write() as session:
                await write(session)
            return
        except (IntegrityError, OperationalError):
            if not attempts_left:
                raise


def sanitize_text(text: str) -> str:
    """Return the text without characters that a database refuses, cut to MAX_REASON_LENGTH characters."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()[:MAX_REASON_LENGTH]
