"""Sessions of the console: begin one with an API key or a one-time link, find it by its cookie, end it.

The cookie and the link's token have 256 random bits, and the database holds their hashes. A session has the rights of
its key at the time of each request: it ends when the key is revoked or expires, when nobody used it for an hour, and
after twelve hours.
"""

import secrets
from dataclasses import dataclass

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, now
from app.core.errors import Unauthorized
from app.models import ApiKey, AuditAction, ConsoleLink, ConsoleSession, record_audit
from app.projects.auth import Caller, read_caller
from app.projects.service import digest_key

SESSION_SECONDS = 12 * 3600.0
IDLE_SECONDS = 3600.0
SEEN_SECONDS = 60.0  # how exact `last_seen_at` is: a request writes it only when it is older
LINK_SECONDS = 600.0
UNKNOWN_LINK = "This link was used before, or it is older than ten minutes. `attune console open` prints another."


@dataclass(frozen=True)
class SignedIn:
    """A session in force, and the caller whose API key began it."""

    token_sha256: str
    csrf_token: str
    caller: Caller
    key_name: str
    notice: str | None


async def create_link(session: AsyncSession, caller: Caller) -> str:
    """Return the token of a link that signs in once, as this caller."""
    await session.execute(delete(ConsoleLink).where(ConsoleLink.expires_at <= now()))
    token = secrets.token_urlsafe(32)
    link = ConsoleLink(token_sha256=digest_key(token), key_id=caller.key_id, expires_at=now() + LINK_SECONDS)
    session.add(link)
    action = AuditAction.CONSOLE_LINK_CREATED
    record_audit(session, caller.key_prefix, action, caller.key_id, project_id=caller.project_id)
    return token


async def use_link(db: Database, token: str) -> Caller:
    """Return the caller of a link, which cannot be used again. Raises Unauthorized."""
    used = (
        delete(ConsoleLink)
        .where(ConsoleLink.token_sha256 == digest_key(token), ConsoleLink.expires_at > now())
        .returning(ConsoleLink.key_id)
    )
    async with db.write() as session:
        key_id = await session.scalar(used)
    found = None if key_id is None else await read_caller(db, ApiKey.id == key_id)
    if found is None:
        raise Unauthorized(UNKNOWN_LINK, code="link_unknown")
    return found[0]


async def begin(session: AsyncSession, caller: Caller, *, how: str) -> str:
    """Sign the caller in. Returns the session's token, for the cookie.

    Args:
        how: "key" or "link", for the audit log.
    """
    await session.execute(delete(ConsoleSession).where(ConsoleSession.expires_at <= now()))
    token = secrets.token_urlsafe(32)
    session.add(
        ConsoleSession(
            token_sha256=digest_key(token),
            key_id=caller.key_id,
            csrf_token=secrets.token_urlsafe(32),
            last_seen_at=now(),
            expires_at=now() + SESSION_SECONDS,
        )
    )
    action = AuditAction.CONSOLE_SIGNED_IN
    record_audit(session, caller.key_prefix, action, caller.key_id, project_id=caller.project_id, how=how)
    return token


async def find(db: Database, token: str) -> SignedIn | None:
    """Return the session of a cookie, if it is in force and its key is active. Records that it was used."""
    columns = (ConsoleSession, ApiKey.name, now() - ConsoleSession.last_seen_at)
    query = (
        select(*columns)
        .join(ApiKey, ApiKey.id == ConsoleSession.key_id)
        .where(
            ConsoleSession.token_sha256 == digest_key(token),
            ConsoleSession.expires_at > now(),
            ConsoleSession.last_seen_at > now() - IDLE_SECONDS,
        )
    )
    async with db.read() as session:
        found = (await session.execute(query)).one_or_none()
    if found is None:
        return None
    row, key_name, unseen_seconds = found
    caller = await read_caller(db, ApiKey.id == row.key_id)
    if caller is None:
        return None
    if unseen_seconds > SEEN_SECONDS:
        is_row = ConsoleSession.token_sha256 == row.token_sha256
        async with db.write() as session:
            await session.execute(update(ConsoleSession).where(is_row).values(last_seen_at=now()))
    return SignedIn(row.token_sha256, row.csrf_token, caller[0], key_name or caller[0].key_prefix, row.notice)


async def set_notice(db: Database, signed_in: SignedIn, notice: str | None) -> None:
    """Set what the next page of this session says once, or remove it."""
    is_row = ConsoleSession.token_sha256 == signed_in.token_sha256
    async with db.write() as session:
        await session.execute(update(ConsoleSession).where(is_row).values(notice=notice))


async def end(session: AsyncSession, signed_in: SignedIn) -> None:
    """Sign out."""
    caller = signed_in.caller
    await session.execute(delete(ConsoleSession).where(ConsoleSession.token_sha256 == signed_in.token_sha256))
    action = AuditAction.CONSOLE_SIGNED_OUT
    record_audit(session, caller.key_prefix, action, caller.key_id, project_id=caller.project_id)
