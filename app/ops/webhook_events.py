"""Events: audit entries that webhook endpoints receive, each as one delivery (one id) per endpoint.

Entries are read in the order of their project's hash chain. Sealing gives a committed entry the next number of the
chain, so that an entry that commits late is read late, but never skipped. The number that an endpoint has read up to
moves in the transaction that creates its deliveries.
"""

from datetime import UTC, datetime

import orjson
from sqlalchemy import ColumnElement, delete, exists, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, now
from app.core.jobs import enqueue_after_commit
from app.core.leases import lease_is_free
from app.core.run_each import run_each
from app.models import Audit, AuditAction, AuditChain, WebhookDelivery, WebhookDeliveryState, WebhookEndpoint, new_id

EVENTS = (
    AuditAction.BATCH_QUARANTINED,
    AuditAction.CANARY_BEGAN,
    AuditAction.CANARY_ENDED,
    AuditAction.DEPLOYMENT_DEPLOYED,
    AuditAction.DEPLOYMENT_ROLLED_BACK,
    AuditAction.SUBJECT_ERASED,
    AuditAction.TRAINING_HALTED,
    AuditAction.VERSION_REJECTED,
)
PAGE_SIZE = 500  # entries that one transaction reads for one endpoint
DELIVERY_SECONDS = 30 * 86400.0  # for which settled deliveries can be listed


def has_due_delivery() -> ColumnElement[bool]:
    """Return the condition that a delivery is due, to an endpoint that may be tried now."""
    return exists().where(
        WebhookDelivery.state == WebhookDeliveryState.OPEN,
        WebhookDelivery.due_at <= now(),
        lease_is_free(WebhookDelivery),
        WebhookEndpoint.id == WebhookDelivery.endpoint_id,
        may_be_tried(),
    )


def may_be_tried() -> ColumnElement[bool]:
    """Return the condition that an endpoint does not fail, or may be tried again."""
    return or_(WebhookEndpoint.retry_at.is_(None), WebhookEndpoint.retry_at <= now())


async def create_deliveries(db: Database) -> None:
    """Create the deliveries of new events, and delete old settled ones."""
    behind = (
        select(WebhookEndpoint.id)
        .join(AuditChain, AuditChain.project_id == WebhookEndpoint.project_id)
        .where(WebhookEndpoint.disabled_at.is_(None), WebhookEndpoint.last_chain_number < AuditChain.number)
    )
    async with db.read() as session:
        endpoint_ids = list(await session.scalars(behind))
        is_old = WebhookDelivery.settled_at < now() - DELIVERY_SECONDS
        old = list(await session.scalars(select(WebhookDelivery.id).where(is_old).limit(PAGE_SIZE)))
    if old:
        async with db.write() as session:
            await session.execute(delete(WebhookDelivery).where(WebhookDelivery.id.in_(old), is_old))

    async def create(endpoint_id: str) -> None:
        async with db.write() as session:
            await _create_deliveries(session, endpoint_id)

    await run_each(sorted(endpoint_ids), create, "webhooks of endpoint")


async def _create_deliveries(session: AsyncSession, endpoint_id: str) -> None:
    endpoint = await session.get(WebhookEndpoint, endpoint_id, with_for_update={"skip_locked": True})
    if endpoint is None or endpoint.disabled_at is not None:
        return
    chain = await session.get_one(AuditChain, endpoint.project_id)
    is_new = Audit.chain_number.between(endpoint.last_chain_number + 1, chain.number)
    query = select(Audit).where(Audit.project_id == endpoint.project_id, is_new).order_by(Audit.chain_number)
    entries = (await session.scalars(query.limit(PAGE_SIZE))).all()
    if len(entries) < PAGE_SIZE:  # also when entries were deleted because they had expired
        endpoint.last_chain_number = chain.number
    for entry in entries:
        endpoint.last_chain_number = max(endpoint.last_chain_number, entry.chain_number or 0)
        if entry.action in endpoint.events and entry.created_at >= endpoint.created_at:
            row = WebhookDelivery(id=new_id("msg"), endpoint_id=endpoint.id, audit_seq=entry.seq, event=entry.action)
            row.body, row.due_at = _build_body(entry), now()
            session.add(row)
            enqueue_after_commit(session, "webhook")


def _build_body(entry: Audit) -> str:
    """Return the JSON of an event: names, ids and numbers. A reason may quote a text, so it stays in the audit log."""
    data = {
        "number": entry.seq,
        "project_id": entry.project_id,
        "actor": entry.actor,
        "subject": entry.subject,
        "details": entry.details,
    }
    timestamp = datetime.fromtimestamp(entry.created_at, UTC).isoformat().replace("+00:00", "Z")
    return orjson.dumps({"type": entry.action, "timestamp": timestamp, "data": data}).decode()
