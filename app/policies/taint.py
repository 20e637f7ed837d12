"""Clean: which versions have learned nothing that was erased, and how far to go back for one."""

from collections.abc import Mapping, Sequence

from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import ONCE_LIVE, Version
from app.policies import repository


def stains(versions: Sequence[Version]) -> dict[str, float]:
    """Since when each version that stands on erased data does so, by id. `versions`: all of a policy, by number.

    A version that was trained after the erasure inherits it from the version it stands on.
    """
    found: dict[str, float] = {}
    for version in versions:
        since = version.tainted_at if version.tainted_at is not None else found.get(version.parent_id or "")
        if since is not None:
            found[version.id] = since
    return found


def last_clean(version: Version, versions: Sequence[Version], stained: Mapping[str, float]) -> Version | None:
    """The nearest forebear that has served and is clean; None if there is none, or if the version itself is clean."""
    if version.id not in stained:
        return None
    by_id = {one.id: one for one in versions}
    at: Version | None = version
    while at is not None and (at.id in stained or at.state not in ONCE_LIVE):
        at = by_id.get(at.parent_id or "")
    return at


async def way_back(session: AsyncSession, policy_id: str, serving: Version) -> Version | None:
    """The last clean one before what serves. Looks at a policy's versions only where something was erased at all."""
    erased = exists().where(Version.policy_id == policy_id, Version.tainted_at.is_not(None))
    if not await session.scalar(select(erased)):
        return None
    versions = await repository.versions_of(session, policy_id)
    return last_clean(serving, versions, stains(versions))
