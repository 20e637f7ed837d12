"""Webhook endpoints of projects: create, change and delete them, rotate their secrets, and send a delivery again."""

from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from sqlalchemy import Select, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, now
from app.core.encryption import PREFIX, SecretCipher, SecretUnreadable, key_id_of, load_cipher, read_cipher
from app.core.errors import BadRequest, Conflict, require_row
from app.core.hosts import normalize_host
from app.core.jobs import enqueue_after_commit
from app.core.pagination import apply_keyset
from app.core.settings import Settings
from app.models import (
    AuditAction,
    AuditChain,
    Project,
    WebhookDelivery,
    WebhookDeliveryState,
    WebhookEndpoint,
    new_id,
    record_audit,
)
from app.ops.webhook_signature import new_secret

MAX_ENDPOINTS = 10  # of a project
ROTATION_SECONDS = 24 * 3600.0  # for which deliveries are signed with the previous secret, too
DISABLED_BY_ADMIN = "an admin disabled it"


def check_url(url: str, private_hosts: Collection[str]) -> None:
    """Raise BadRequest for a URL that no delivery may be sent to. Where its name leads is checked at each delivery."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadRequest(f"url: {error}.", param="url", code="invalid_value") from error
    is_private = normalize_host(host or "") in {normalize_host(name) for name in private_hosts}
    if not host or port == 0 or parts.scheme not in (("https", "http") if is_private else ("https",)):
        raise BadRequest("url: it must be an https URL with a host.", param="url", code="invalid_value")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise BadRequest("url: it may hold no user, password or fragment.", param="url", code="invalid_value")


async def create_endpoint(
    session: AsyncSession, project_id: str, *, actor: str, cipher: SecretCipher, **values: object
) -> tuple[WebhookEndpoint, str]:
    """Create an endpoint, which receives the events from now on; return it with its secret.

    Raises Conflict for one too many.
    """
    await session.get_one(Project, project_id, with_for_update=True)  # two creations take turns
    count = select(func.count()).where(WebhookEndpoint.project_id == project_id)
    if (await session.scalar(count) or 0) >= MAX_ENDPOINTS:
        raise Conflict(f"A project has at most {MAX_ENDPOINTS} webhook endpoints.", code="too_many_webhooks")
    secret = new_secret()
    row = WebhookEndpoint(
        id=new_id("whk"),
        project_id=project_id,
        secret=cipher.encrypt(secret),
        last_chain_number=await _last_chain_number(session, project_id),
        **values,
    )
    session.add(row)
    await session.flush()
    await session.refresh(row)
    record_audit(session, actor, AuditAction.WEBHOOK_CREATED, row.id, project_id=project_id, events=row.events)
    return row, secret


async def _last_chain_number(session: AsyncSession, project_id: str) -> int:
    """Return the number of the project's last sealed audit entry."""
    return await session.scalar(select(AuditChain.number).where(AuditChain.project_id == project_id)) or 0


async def list_endpoints(session: AsyncSession, project_id: str) -> Sequence[WebhookEndpoint]:
    """Return the endpoints of a project, the oldest first."""
    query = select(WebhookEndpoint).where(WebhookEndpoint.project_id == project_id)
    return (await session.scalars(query.order_by(WebhookEndpoint.created_at, WebhookEndpoint.id))).all()


async def get_endpoint(session: AsyncSession, project_id: str, id: str, *, lock: bool = False) -> WebhookEndpoint:
    """Return an endpoint of the project. Raises NotFound."""
    query = select(WebhookEndpoint).where(WebhookEndpoint.project_id == project_id, WebhookEndpoint.id == id)
    row = await session.scalar(query.with_for_update() if lock else query)
    return require_row(row, f"There is no webhook '{id}'.", param="webhook_id")


async def change_endpoint(
    session: AsyncSession, project_id: str, id: str, *, actor: str, enabled: bool | None = None, **values: object
) -> WebhookEndpoint:
    """Change what is given in `values`; enable or disable the endpoint. Raises NotFound.

    An endpoint that is enabled again receives the events from now on; a changed URL is tried at once.
    """
    row = await get_endpoint(session, project_id, id, lock=True)
    for name, value in values.items():
        setattr(row, name, value)
    if "url" in values:
        forget_failures(row)
    if enabled and row.disabled_at is not None:
        row.disabled_at, row.disabled_reason = None, None
        row.last_chain_number = await _last_chain_number(session, project_id)
        forget_failures(row)
    await session.flush()
    details: dict[str, bool] = {} if enabled is None else {"enabled": enabled}
    changed = sorted(values)
    record_audit(
        session, actor, AuditAction.WEBHOOK_UPDATED, row.id, None, project_id=project_id, changed=changed, **details
    )
    if enabled is False and row.disabled_at is None:
        disable_endpoint(session, row, actor=actor, reason=DISABLED_BY_ADMIN)
        await session.flush()
    await session.refresh(row)
    return row


def forget_failures(row: WebhookEndpoint) -> None:
    """Let the next delivery be sent at once."""
    row.failures, row.failing_since, row.retry_at = 0, None, None


def disable_endpoint(session: AsyncSession, row: WebhookEndpoint, *, actor: str, reason: str) -> None:
    """Send nothing to the endpoint until an admin enables it."""
    row.disabled_at, row.disabled_reason = now(), reason
    record_audit(session, actor, AuditAction.WEBHOOK_DISABLED, row.id, reason, project_id=row.project_id)


async def delete_endpoint(session: AsyncSession, project_id: str, id: str, *, actor: str) -> WebhookEndpoint:
    """Delete the endpoint with its deliveries. Raises NotFound."""
    row = await get_endpoint(session, project_id, id, lock=True)
    await session.delete(row)
    record_audit(session, actor, AuditAction.WEBHOOK_DELETED, row.id, project_id=project_id)
    return row


async def rotate_secret(
    session: AsyncSession, project_id: str, id: str, *, actor: str, cipher: SecretCipher
) -> tuple[WebhookEndpoint, str]:
    """Give the endpoint a new secret; return both. For a day deliveries are signed with the old one, too.

    Raises NotFound.
    """
    row = await get_endpoint(session, project_id, id, lock=True)
    row.previous_secret, row.previous_secret_until = row.secret, now() + ROTATION_SECONDS
    secret = new_secret()
    row.secret = cipher.encrypt(secret)
    await session.flush()
    await session.refresh(row)
    record_audit(session, actor, AuditAction.WEBHOOK_SECRET_ROTATED, row.id, project_id=project_id)
    return row, secret


async def encrypt_secrets(db: Database, settings: Settings) -> None:
    """Encrypt with the first key what is stored in clear text, or with another key that is known."""
    async with db.read() as session:
        if await session.scalar(_has_outdated_secret(read_cipher(settings)).limit(1)) is None:
            return
    cipher = load_cipher(settings)
    async with db.write() as session:
        rows = await session.scalars(_has_outdated_secret(cipher).with_for_update())
        for row in rows:
            row.secret = _encrypt_again(cipher, row.secret)
            if row.previous_secret is not None:
                row.previous_secret = _encrypt_again(cipher, row.previous_secret)


def _has_outdated_secret(cipher: SecretCipher) -> Select[WebhookEndpoint]:
    """Return the query for the endpoints that have one. Those with a key that is missing are not among them."""
    outdated = [PREFIX + id + ":" for id in cipher.key_ids - {cipher.first_id}]
    columns = (WebhookEndpoint.secret, WebhookEndpoint.previous_secret)
    is_outdated = [
        condition for one in columns for condition in (~one.startswith(PREFIX), *map(one.startswith, outdated))
    ]
    return select(WebhookEndpoint).where(or_(*is_outdated)).order_by(WebhookEndpoint.id)


def _encrypt_again(cipher: SecretCipher, stored: str) -> str:
    if key_id_of(stored) == cipher.first_id:
        return stored
    try:
        return cipher.encrypt(cipher.decrypt(stored))
    except SecretUnreadable:
        return stored


async def list_deliveries(
    session: AsyncSession, endpoint_id: str, state: str | None, after: str | None, limit: int
) -> Sequence[WebhookDelivery]:
    """Return up to `limit + 1` deliveries after this id, the newest first. Raises NotFound."""
    query = select(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint_id)
    if state is not None:
        query = query.where(WebhookDelivery.state == state)
    last = None if after is None else await _get_delivery(session, endpoint_id, after, param="after")
    columns = (WebhookDelivery.created_at, WebhookDelivery.id)
    return (await session.scalars(apply_keyset(query, columns, last, limit, descending=True))).all()


async def _get_delivery(session: AsyncSession, endpoint_id: str, id: str, *, param: str) -> WebhookDelivery:
    query = select(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint_id, WebhookDelivery.id == id)
    return require_row(await session.scalar(query), f"There is no delivery '{id}'.", param=param)


async def redeliver(
    session: AsyncSession, project_id: str, endpoint_id: str, id: str, *, actor: str
) -> WebhookDelivery:
    """Send a delivery again as if it were new, with the same id. Raises NotFound, and Conflict if it is disabled."""
    endpoint = await get_endpoint(session, project_id, endpoint_id, lock=True)
    if endpoint.disabled_at is not None:
        raise Conflict(f"The webhook '{endpoint_id}' is disabled; enable it first.", code="webhook_disabled")
    forget_failures(endpoint)
    row = await _get_delivery(session, endpoint_id, id, param="delivery_id")
    row.state, row.attempt, row.due_at, row.reason, row.settled_at = WebhookDeliveryState.OPEN, 0, now(), None, None
    row.lease_owner, row.lease_until, row.fence = None, None, row.fence + 1
    await session.flush()
    await session.refresh(row)
    details = {"delivery": row.id, "event": row.event}
    record_audit(session, actor, AuditAction.WEBHOOK_REDELIVERED, endpoint_id, project_id=project_id, **details)
    enqueue_after_commit(session, "webhook")
    return row
