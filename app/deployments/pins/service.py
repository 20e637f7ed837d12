"""Who is held on which version: an admin's word, which the next request of theirs follows.

Callers have the policy's lock. So no two words on one subject meet, and no erasure, which takes the lock too, marks the
version or removes the pin meanwhile.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.errors import Conflict, NotFound
from app.core.jobs import enqueue_after_commit
from app.deployments.pins import repository
from app.deployments.pins.schemas import PinRequest
from app.models import SERVED_TRAFFIC, ApiKey, Engine, Pin, PinKind, Policy, Version, new_id, record_audit
from app.policies import repository as policies
from app.policies.service import holds, label, ready_engines
from app.privacy.identities import masked

PINNED, UNPINNED = "pin", "unpin"  # of the audit


async def pin(session: AsyncSession, policy: Policy, asked: PinRequest, *, actor: str) -> tuple[Pin, Version]:
    """The same again changes nothing; another version, or another reason, is a new word on the same pin. Raises
    NotFound, Conflict."""
    version = await _servable(session, policy, asked.version)
    engines = await ready_engines(session)
    if not engines or not all(holds(engine, version) for engine in engines):
        enqueue_after_commit(session, "reconcile")
    is_key = asked.kind == PinKind.KEY
    subject = (await _key(session, policy.project_id, asked.subject)).id if is_key else asked.subject
    row, left = await repository.pin_of(session, policy.id, asked.kind, subject) or (None, None)
    if row is not None and row.version_id == version.id and asked.reason in (None, row.reason):
        return row, version
    told: dict[str, Any] = {"policy": policy.name, "kind": asked.kind, "version": version.number}
    told |= {"previous": left.number} if left is not None else {}
    told |= {"key": subject} if is_key else {"whose": whose(policy.project_id, asked.kind, subject)}
    if row is None:
        row = Pin(id=new_id("pin"), project_id=policy.project_id, policy_id=policy.id, kind=asked.kind, subject=subject)
        session.add(row)
    row.version_id, row.reason, row.actor, row.created_at = version.id, asked.reason, actor, now()
    await session.flush()
    await session.refresh(row)
    record_audit(session, actor, PINNED, row.id, asked.reason, project_id=policy.project_id, **told)
    return row, version


async def unpin(session: AsyncSession, policy: Policy, pin_id: str, *, actor: str) -> None:
    """Raises NotFound."""
    row, version = await repository.pin(session, policy.id, pin_id)
    told: dict[str, Any] = {"policy": policy.name, "kind": row.kind, "version": version.number}
    await session.delete(row)
    record_audit(session, actor, UNPINNED, row.id, project_id=policy.project_id, **told)


def loaded(engines: Sequence[Engine], version: Version) -> bool:
    """Whether a ready engine holds it, to answer whoever is pinned."""
    return any(holds(engine, version) for engine in engines)


def whose(project_id: str, kind: str, subject: str) -> str:
    """What the audit keeps of a conversation or a user: enough for an erasure to find the entry, and no name."""
    return masked(project_id, f"{kind}/{subject}")


async def _servable(session: AsyncSession, policy: Policy, number: int) -> Version:
    version = await policies.version_numbered(session, policy.id, number)
    if version is None:
        raise NotFound(f"Policy '{policy.name}' has no version v{number}.", code="model_not_found", param="version")
    if version.state not in SERVED_TRAFFIC:
        told = f"{label(policy, version)} is {version.state}; a pin needs a version that has served, or the canary."
        raise Conflict(told, code="version_not_servable", param="version")
    if version.tainted_at is not None:
        told = f"{label(policy, version)} has learned from what is erased now; nobody may be held on it."
        raise Conflict(told, code="version_erased", param="version")
    return version


async def _key(session: AsyncSession, project_id: str, named: str) -> ApiKey:
    found = await repository.keys(session, project_id, named)
    if not found:  # does not repeat what was sent: it may be a whole key
        raise NotFound("There is no such key in this project; send its id or its shown prefix.", param="subject")
    if len(found) > 1:
        raise Conflict("Several keys are shown with this prefix; send the key's id.", param="subject")
    return found[0]
