"""Run a function that a user wrote in a thread, for a limited time."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class UserCodeError(Exception):
    """The function raised an exception or took too long.

    A thread cannot be stopped: a function that hangs goes on until the process ends.
    """


async def run_user_code(
    function: Callable[[], T], seconds: float, *, noun: str, reraise: tuple[type[Exception], ...] = ()
) -> T:
    """Return what the function returns. Raises UserCodeError, and exceptions of the `reraise` types unchanged.

    `noun` names the function in the message of a time-out.
    """

    def call() -> T:
        try:
            return function()
        except reraise:
            raise
        except (Exception, SystemExit) as error:
            raise UserCodeError(f"{type(error).__name__}: {error}") from error

    try:
        async with asyncio.timeout(seconds):
            return await asyncio.to_thread(call)
    except TimeoutError as error:
        raise UserCodeError(f"the {noun} took more than {seconds:g} s") from error
