"""Counts the browser tokens that are created, so that the audit has an entry for each minute and key, not for each
token: pages create one for each reply, and entries are kept for long.

A count is committed before its token is returned. The reconciler makes entries of the minutes that have ended.
"""

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import delete, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from app.core.database import Database, database_time, now
from app.core.errors import AttuneError
from app.core.group_commit import GroupCommit
from app.models import AuditAction, Project, TokenCount, record_audit

MINUTE_SECONDS = 60
MAX_ROWS = 1000  # counts that become entries in one transaction


class TokenRequester(NamedTuple):
    """Who creates a token: a project's key, by its prefix."""

    project_id: str
    actor: str


class TokenCounter(GroupCommit[TokenRequester, str]):
    """Counts tokens, those of concurrent requests in shared transactions. `submit` returns the project's secret."""

    def __init__(self, db: Database) -> None:
        super().__init__(db, count_tokens)


def count_tokens(connection: Connection, requesters: Sequence[TokenRequester]) -> list[str | AttuneError]:
    """Count a token for each requester, and return the secret that signs it: the first one of a project creates it."""
    project_ids = {requester.project_id for requester in requesters}
    query = select(Project.id, Project.token_secret, now()).where(Project.id.in_(project_ids)).order_by(Project.id)
    rows = connection.execute(query).all()
    signing = {id: secret or _create_secret(connection, id) for id, secret, _ in rows}
    minute = int(rows[0][2] // MINUTE_SECONDS)
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    insert = dialect.insert(TokenCount).values(
        [
            {"project_id": project_id, "actor": actor, "minute": minute, "num_tokens": number}
            for (project_id, actor), number in sorted(
                Counter(requesters).items()
            )  # all transactions lock in this order
        ]
    )
    total = TokenCount.num_tokens + insert.excluded.num_tokens
    connection.execute(
        insert.on_conflict_do_update(index_elements=["project_id", "actor", "minute"], set_={"num_tokens": total})
    )
    return [signing[requester.project_id] for requester in requesters]


def _create_secret(connection: Connection, project_id: str) -> str:
    """Return the project's secret. If two processes create it at the same time, both get the first one."""
    without_secret = (Project.id == project_id, Project.token_secret.is_(None))
    connection.execute(update(Project).where(*without_secret).values(token_secret=secrets.token_hex(32)))
    secret = connection.scalar(select(Project.token_secret).where(Project.id == project_id))
    assert secret is not None, f"project {project_id} does not exist"
    return secret


async def record_counts(db: Database) -> int:
    """Make audit entries of the counts whose minute has ended. Return their number.

    A transaction that counts across the end of its minute leaves a second count, which becomes another entry.
    """
    key = (TokenCount.project_id, TokenCount.actor, TokenCount.minute)
    num_entries = 0
    while True:
        async with db.write() as session:
            this_minute = await database_time(session) // MINUTE_SECONDS
            ended = select(*key).where(TokenCount.minute < this_minute).order_by(*key).limit(MAX_ROWS)
            keys = [tuple(row) for row in await session.execute(ended.with_for_update())]
            if not keys:
                return num_entries
            counted = delete(TokenCount).where(tuple_(*key).in_(keys)).returning(*key, TokenCount.num_tokens)
            for project_id, actor, minute, num_tokens in sorted((await session.execute(counted)).tuples()):
                record_audit(
                    session,
                    actor,
                    AuditAction.TOKEN_CREATED,
                    actor,
                    project_id=project_id,
                    tokens=num_tokens,
                    since=minute * MINUTE_SECONDS,
                )
        num_entries += len(keys)
