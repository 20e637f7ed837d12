"""The lock of a policy: who assembles, trains, releases or erases holds it until the transaction ends."""

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncSession

from app.models import Policy


class LockedPolicy(NamedTuple):
    """A policy whose row the session's transaction has locked. Only `lock_policy` makes one.

    A function that needs the lock takes this value in place of a session and a policy.
    """

    session: AsyncSession
    policy: Policy


async def lock_policy(session: AsyncSession, policy_id: str) -> LockedPolicy:
    """Lock the policy's row until the transaction ends, and read it again. Rows that refer to it can still be added.

    The policy is locked before its turns, batches, versions and reward models.
    """
    policy = await session.get_one(Policy, policy_id, with_for_update={"key_share": True}, populate_existing=True)
    return LockedPolicy(session, policy)


async def lock_policies(session: AsyncSession, policy_ids: Collection[str]) -> dict[str, LockedPolicy]:
    """Lock these policies one after the other, in the order of their ids, and return them by id."""
    return {id: await lock_policy(session, id) for id in sorted(set(policy_ids))}
