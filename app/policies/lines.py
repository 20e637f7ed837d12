"""Lines of versions: a version with its ancestors. Two lines of a policy have at least the first version in common."""

from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import Version

PAGE_SIZE = 1000  # versions that are read at once


class LineVersion(NamedTuple):
    """A version in a line; `batch_id` is the batch that it has learned from."""

    id: str
    number: int
    parent_id: str | None
    batch_id: str | None


async def compare_lines(session: AsyncSession, old_id: str, new_id: str) -> tuple[list[LineVersion], list[LineVersion]]:
    """Return the versions that are in the line of `old_id` alone, and those in that of `new_id` alone."""
    known: dict[str, LineVersion] = {}

    async def find(id: str) -> LineVersion:
        if id not in known:
            await _read_page(session, id, known)
        return known[id]

    old, new = await find(old_id), await find(new_id)
    leaving: list[LineVersion] = []
    joining: list[LineVersion] = []
    while old.id != new.id:  # a version's number is larger than its parent's
        later, side = (old, leaving) if old.number > new.number else (new, joining)
        side.append(later)
        assert later.parent_id is not None, "the versions of a policy descend from its first one"
        parent = await find(later.parent_id)
        old, new = (parent, new) if later is old else (old, parent)
    return leaving, joining


async def _read_page(session: AsyncSession, id: str, known: dict[str, LineVersion]) -> None:
    """Read a version and those of its policy with the next smaller numbers, most of which are its ancestors."""
    first = select(Version.policy_id, Version.number).where(Version.id == id).subquery()
    columns = (Version.id, Version.number, Version.parent_id, Version.batch_id)
    page = select(*columns).join(first, Version.policy_id == first.c.policy_id)
    page = page.where(Version.number <= first.c.number).order_by(Version.number.desc()).limit(PAGE_SIZE)
    known |= {row.id: LineVersion(*row) for row in await session.execute(page)}
