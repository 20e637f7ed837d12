"""Shares of a policy's traffic: other policies of the project that answer some of the requests that name it.

Which policy answers is decided by the end user, or by the conversation where requests name no user. A conversation
stays with the policy that answered its last turn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from sqlalchemy import bindparam, func, select
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import BadRequest, Conflict
from app.models import ANSWERING, AuditAction, Policy, PolicyState, Project
from app.policies import service
from app.policies.locks import LockedPolicy
from app.policies.service import Attribution, audit_policy

ROUNDING = 1e-9  # of a sum of shares


@dataclass(frozen=True)
class Branch:
    """A policy that answers a share of another's requests."""

    policy_id: str
    name: str
    share: float


SELECT_BRANCHES = (
    select(Policy.id, Policy.name, Policy.traffic_share)
    .where(Policy.traffic_from_id == bindparam("policy"), Policy.state == PolicyState.ACTIVE)
    .order_by(Policy.id)
)


def read_branches(connection: Connection, policy_id: str) -> tuple[Branch, ...]:
    """Return the active policies that answer a share of this one's requests."""
    rows = connection.execute(SELECT_BRANCHES, {"policy": policy_id})
    return tuple(Branch(id, name, share or 0.0) for id, name, share in rows)


def find_branch(
    policy_id: str, branches: Sequence[Branch], split_key: str, previous_policy_id: str | None = None
) -> Branch | None:
    """Return the policy that answers in place of this one, or None.

    A conversation whose last turn this policy or a branch answered stays there. Others are assigned by weighted
    rendezvous hashing: one key always gets the same answer, and a branch whose share grows keeps its keys.

    Args:
        split_key: The end user, else the conversation.
        previous_policy_id: The policy that answered the conversation's last turn.
    """
    if previous_policy_id is not None:
        if previous_policy_id == policy_id:
            return None
        if (branch := next((one for one in branches if one.policy_id == previous_policy_id), None)) is not None:
            return branch
    rest = max(0.0, 1 - sum(branch.share for branch in branches))
    weights: list[tuple[Branch | None, float]] = [(None, rest), *((branch, branch.share) for branch in branches)]
    scores = [
        (_distance(policy_id, branch.policy_id if branch else policy_id, split_key) / weight, branch)
        for branch, weight in weights
        if weight > ROUNDING
    ]
    return min(scores, key=lambda score: score[0])[1]


def _distance(policy_id: str, candidate_id: str, split_key: str) -> float:
    """Return an exponentially distributed number that the arguments decide: the smallest of several, each divided by a
    weight, belongs to each with a probability of its share of the weights (Efraimidis & Spirakis, 2006)."""
    digest = blake2b(f"{policy_id}/{candidate_id}/{split_key}".encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest) + 0.5) / 2**64)


async def set_traffic(locked: LockedPolicy, source_name: str, share: float, by: Attribution) -> None:
    """Let the policy answer a share of the requests that name another policy of its project.

    Raises NotFound, BadRequest, Conflict.
    """
    session, policy = locked
    await session.get_one(Project, policy.project_id, with_for_update={"key_share": True})  # so that sums are right
    source = await service.get_policy(session, policy.project_id, source_name)
    if source.id == policy.id:
        raise BadRequest("traffic.from: a policy cannot take a share of its own traffic.", param="traffic.from")
    if source.state not in ANSWERING:
        raise Conflict(f"'{source.name}' is {source.state}: it has no traffic.", code="policy_archived")
    is_other = (Policy.traffic_from_id == source.id, Policy.id != policy.id, Policy.state != PolicyState.DELETED)
    taken = await session.scalar(select(func.sum(Policy.traffic_share)).where(*is_other)) or 0.0
    if taken + share > 1 + ROUNDING:
        message = (
            f"traffic.share: the shares of '{source.name}' would add up to {taken + share:g}; other policies have "
            f"{taken:g}, so that at most {1 - taken:g} is left."
        )
        raise BadRequest(message, param="traffic.share", code="invalid_value")
    if (policy.traffic_from_id, policy.traffic_share) == (source.id, share):
        return
    policy.traffic_from_id, policy.traffic_share = source.id, share
    audit_policy(session, policy, AuditAction.POLICY_UPDATED, *by, traffic={"from": source.name, "share": share})


def clear_traffic(locked: LockedPolicy, by: Attribution) -> None:
    """Let the policy answer only requests that name it."""
    session, policy = locked
    if policy.traffic_from_id is not None:
        policy.traffic_from_id = policy.traffic_share = None
        audit_policy(session, policy, AuditAction.POLICY_UPDATED, *by, traffic=None)


async def require_no_dependents(session: AsyncSession, policy: Policy, *, archived: bool) -> None:
    """Raise Conflict if other policies take a share of this one's traffic; with `archived` archived ones count too."""
    states = (*ANSWERING, PolicyState.ARCHIVED) if archived else ANSWERING
    dependent = select(Policy.name).where(Policy.traffic_from_id == policy.id, Policy.state.in_(states))
    names: list[Any] = list(await session.scalars(dependent.order_by(Policy.name, Policy.id)))
    if names:
        message = (
            f"{', '.join(names)} would lose traffic: they answer a share of the requests for '{policy.name}'. Change "
            f'their `traffic` first, e.g. PATCH /v1/policies/{names[0]} {{"traffic": null}}.'
        )
        raise Conflict(message, code="policy_in_use")
