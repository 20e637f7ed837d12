"""Pins: conversations, end users and API keys that an admin holds on one version, from their next request on.

They change under the policy's lock. So changes of one subject's pin do not overlap, and an erasure, which takes it
too, neither taints the version nor removes the pin meanwhile.
"""

from sqlalchemy import Select, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.errors import Conflict, NotFound, require_row
from app.core.jobs import enqueue_after_commit
from app.core.pagination import apply_keyset
from app.deployments.schemas import PinRequest
from app.deployments.service import require_untainted
from app.engines.fleet import is_loaded, list_ready_engines
from app.models import SERVED_TRAFFIC, ApiKey, AuditAction, Pin, PinKind, Policy, Project, Version, new_id
from app.policies import repository
from app.policies.locks import LockedPolicy
from app.policies.references import version_name
from app.policies.service import audit_policy, require_files
from app.raters.names import hash_name


async def set_pin(locked: LockedPolicy, request: PinRequest, *, actor: str, limit: int | None) -> tuple[Pin, Version]:
    """Create or change the subject's pin. The same request again changes nothing. Raises NotFound, Conflict.

    `limit` is the most pins of the project.
    """
    session, policy = locked
    version = await _get_pinnable_version(session, policy, request.version)
    engines = await list_ready_engines(session)
    if not engines or not all(is_loaded(engine, version) for engine in engines):
        enqueue_after_commit(session, "reconcile")
    is_key = request.kind == PinKind.KEY
    subject = (await _get_key(session, policy.project_id, request.subject)).id if is_key else request.subject
    query = _select_pins(policy.id).where(Pin.kind == request.kind, Pin.subject == subject)
    pin, previous = (await session.execute(query)).one_or_none() or (None, None)
    if pin is not None and pin.version_id == version.id and request.reason in (None, pin.reason):
        return pin, version
    details: dict[str, object] = {"policy": policy.name, "kind": request.kind, "version": version.number}
    if previous is not None:
        details["previous"] = previous.number
    if is_key:
        details["key"] = subject
    else:
        details["subject_sha256"] = subject_hash(policy.project_id, request.kind, subject)
    if pin is None:
        await _require_free_pin(session, policy.project_id, limit)
        pin = Pin(
            id=new_id("pin"), project_id=policy.project_id, policy_id=policy.id, kind=request.kind, subject=subject
        )
        session.add(pin)
    pin.version_id, pin.reason, pin.actor, pin.created_at = version.id, request.reason, actor, now()
    await session.flush()
    await session.refresh(pin)
    audit_policy(session, policy, AuditAction.PIN_SET, actor, request.reason, subject=pin.id, **details)
    return pin, version


async def _require_free_pin(session: AsyncSession, project_id: str, limit: int | None) -> None:
    """Raise Conflict if the project has as many pins as it may have."""
    if limit is None:
        return
    locked = select(Project.id).where(Project.id == project_id).with_for_update(key_share=True)
    await session.execute(locked)  # pins of other policies, too, would make the count inexact
    num_pins = await session.scalar(select(func.count()).select_from(Pin).where(Pin.project_id == project_id)) or 0
    if num_pins >= limit:
        message = (
            f"This project has {num_pins} pins, and may have {limit} (limit `pins`); remove pins that are not needed."
        )
        raise Conflict(message, code="project_limit")


async def remove_pin(locked: LockedPolicy, pin_id: str, *, actor: str) -> None:
    """Raises NotFound."""
    session, policy = locked
    row = (await session.execute(_select_pins(policy.id).where(Pin.id == pin_id))).one_or_none()
    pin, version = require_row(row, f"There is no pin '{pin_id}'.", param="pin_id")
    await session.delete(pin)
    details: dict[str, object] = {"policy": policy.name, "kind": pin.kind, "version": version.number}
    audit_policy(session, policy, AuditAction.PIN_REMOVED, actor, subject=pin.id, **details)


def subject_hash(project_id: str, kind: str, subject: str) -> str:
    """Return what the audit log keeps of a conversation or an end user: an erasure can find the entry by it."""
    return hash_name(project_id, f"{kind}/{subject}")


async def _get_pinnable_version(session: AsyncSession, policy: Policy, number: int) -> Version:
    row = await repository.find_version(session, policy.id, number)
    message = f"Policy '{policy.name}' has no version v{number}."
    version = require_row(row, message, code="model_not_found", param="version")
    name = version_name(policy, version)
    if version.state not in SERVED_TRAFFIC:
        message = f"{name} is {version.state}; a pin needs a version that has served traffic, or the canary."
        raise Conflict(message, code="version_not_servable", param="version")
    require_files(policy, version)
    await require_untainted(session, policy, version)
    return version


async def _get_key(session: AsyncSession, project_id: str, id_or_prefix: str) -> ApiKey:
    matches = or_(ApiKey.id == id_or_prefix, ApiKey.prefix == id_or_prefix)
    query = select(ApiKey).where(ApiKey.project_id == project_id, matches)
    keys = list(await session.scalars(query.limit(2)))
    if not keys:  # the message does not repeat the value, which may be a whole key
        raise NotFound("There is no such API key in this project; send its id or its visible prefix.", param="subject")
    if len(keys) > 1:
        raise Conflict("Several API keys have this prefix; send the key's id.", param="subject")
    return keys[0]


async def list_pins(
    session: AsyncSession, policy_id: str, kind: str | None, after: str | None, limit: int
) -> list[tuple[Pin, Version]]:
    """Return up to `limit + 1` pins after the id `after`.

    They are ordered by id, so that a pin which is changed or removed meanwhile does not shift the others.
    """
    query = _select_pins(policy_id)
    if kind is not None:
        query = query.where(Pin.kind == kind)
    query = apply_keyset(query, (Pin.id,), None if after is None else (after,), limit)
    return [(pin, version) for pin, version in await session.execute(query)]


def _select_pins(policy_id: str) -> Select[Pin, Version]:
    return select(Pin, Version).join(Version, Version.id == Pin.version_id).where(Pin.policy_id == policy_id)
