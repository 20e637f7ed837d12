"""Work for many policies or projects, one after the other: a failure of one leaves the others untouched."""

import logging
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from itertools import zip_longest
from typing import TypeVar

from sqlalchemy.exc import DBAPIError

T = TypeVar("T")
log = logging.getLogger("attune.each")


async def run_each(items: Iterable[T], work: Callable[[T], Awaitable[int | None]], what: str) -> int:
    """Run `work` for each item and return the sum of its results.

    An exception is logged, the other items follow, and then all exceptions are raised as an ExceptionGroup. Only a lost
    connection of the database ends the run at once: it concerns all items.

    Args:
        what: What is done, for the log. Example: "the assembly of".
    """
    total, errors = 0, list[Exception]()
    for item in items:
        try:
            total += await work(item) or 0
        except Exception as error:
            if isinstance(error, DBAPIError) and error.connection_invalidated:
                raise
            log.exception("%s %s failed; the others follow", what, item)
            errors.append(error)
    if errors:
        raise ExceptionGroup(f"{what} {len(errors)} failed", errors)
    return total


def take_turns(pairs: Iterable[tuple[str, T]]) -> list[T]:
    """Return the items of all projects: the first one of each, the second one of each, and so on.

    The projects are in another random order each time.

    Args:
        pairs: (project id, item), in the order of the project's own items.
    """
    by_project: defaultdict[str, list[T]] = defaultdict(list)
    for project_id, item in pairs:
        by_project[project_id].append(item)
    queues = random.sample(list(by_project.values()), len(by_project))
    missing = object()
    return [item for turn in zip_longest(*queues, fillvalue=missing) for item in turn if item is not missing]  # type: ignore[misc]
