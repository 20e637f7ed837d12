"""The hash chain of the audit log: what verification finds, what the database refuses, what an erasure may change."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import Audit, AuditAction, record_audit
from app.ops import audit_chain
from tests.support.deployment import Harness

NAME = "HUMAN/rude-5f1c0e"


async def add_entries(harness: Harness, count: int, project_id: str | None = None) -> None:
    project_id = project_id or (await harness.policy()).project_id
    for number in range(count):
        async with harness.db.write() as session:
            action = AuditAction.DEPLOYMENT_DEPLOYED
            record_audit(session, "sk-attune-1", action, f"shop@v{number}", "why", project_id=project_id, number=number)


async def verify(harness: Harness, **params: str) -> dict[str, Any]:
    answer = await harness.api.get("/v1/audit/verify", params=params)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def list_seqs(harness: Harness) -> list[int]:
    return sorted(row.seq for row in await harness.all(Audit))


@asynccontextmanager
async def without_triggers(harness: Harness) -> AsyncIterator[AsyncSession]:
    """Open a transaction as somebody who owns the database and has switched the triggers off."""
    async with harness.db.write() as session:
        if harness.db.embedded:
            for name in await session.scalars(text("SELECT name FROM sqlite_master WHERE type = 'trigger'")):
                await session.execute(text(f"DROP TRIGGER {name}"))
        else:
            await session.execute(text("SET LOCAL session_replication_role = replica"))
        yield session


async def test_new_entries_wait_until_they_are_sealed(harness: Harness) -> None:
    await add_entries(harness, 3)
    await add_entries(harness, 2, "another")
    before = await verify(harness)
    assert (before["ok"], before["entries"], before["unsealed"], before["head"]) == (True, 0, 3, None)
    await audit_chain.seal_entries(harness.db)
    rows = await harness.all(Audit)
    assert sorted((row.project_id == "another", row.chain_number) for row in rows) == [
        *((False, number) for number in (1, 2, 3)),
        *((True, number) for number in (1, 2)),
    ]
    after = await verify(harness)
    assert (after["ok"], after["entries"], after["unsealed"], after["number"]) == (True, 3, 0, None)
    assert after["head"] == next(row.chain_hash for row in rows if row.seq == 3)
    await audit_chain.seal_entries(harness.db)
    assert await verify(harness) == after


async def test_more_entries_than_one_run_seals(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_chain, "PAGE_SIZE", 2)
    await add_entries(harness, 5)
    for unsealed in (3, 1, 0):
        await audit_chain.seal_entries(harness.db)
        assert (await verify(harness))["unsealed"] == unsealed
    body = await verify(harness)
    assert (body["ok"], body["entries"]) == (True, 5)


EXCHANGE = "UPDATE audit SET subject = CASE seq WHEN 2 THEN 'shop@v2' ELSE 'shop@v1' END WHERE seq IN (2, 3)"
TAMPERING = {
    "actor": ("UPDATE audit SET actor = 'nobody' WHERE seq = 3", 3),
    "action": ("UPDATE audit SET action = 'canary.ended' WHERE seq = 3", 3),
    "subject": ("UPDATE audit SET subject = 'shop@v9' WHERE seq = 1", 1),
    "reason": ("UPDATE audit SET reason = NULL WHERE seq = 4", 4),
    "details": ("UPDATE audit SET details = '{\"number\": 7}' WHERE seq = 2", 2),
    "time": ("UPDATE audit SET created_at = created_at + 1 WHERE seq = 2", 2),
    "seq": ("UPDATE audit SET seq = 9 WHERE seq = 4", 9),
    "project": ("UPDATE audit SET project_id = 'another' WHERE seq = 2", 3),
    "hash": ("UPDATE audit SET chain_hash = (SELECT chain_hash FROM audit WHERE seq = 1) WHERE seq = 2", 2),
    "first missing": ("DELETE FROM audit WHERE seq = 1", 2),
    "missing": ("DELETE FROM audit WHERE seq = 3", 4),
    "last missing": ("DELETE FROM audit WHERE seq = 4", 3),
    "unsealed": ("UPDATE audit SET chain_hash = NULL, chain_number = NULL WHERE seq = 2", 3),
    "contents exchanged": (EXCHANGE, 2),
    "blanked": ("UPDATE audit SET reason = NULL, details = '{}', erased_sha256 = chain_hash WHERE seq = 2", 2),
}


@pytest.mark.parametrize("statement, number", TAMPERING.values(), ids=TAMPERING)
async def test_changed_or_missing_entry_is_found(harness: Harness, statement: str, number: int) -> None:
    await add_entries(harness, 4)
    await audit_chain.seal_entries(harness.db)
    async with without_triggers(harness) as session:
        await session.execute(text(statement.replace(":", r"\:")))
    body = await verify(harness)
    assert (body["ok"], body["number"]) == (False, number), body


async def test_reordered_entries_are_found(harness: Harness) -> None:
    await add_entries(harness, 4)
    await audit_chain.seal_entries(harness.db)
    async with without_triggers(harness) as session:
        for new, old in ((99, 2), (2, 3), (3, 99)):
            await session.execute(text(f"UPDATE audit SET chain_number = {new} WHERE chain_number = {old}"))
    body = await verify(harness)
    assert (body["ok"], body["number"]) == (False, 3)


async def test_all_entries_missing_is_found(harness: Harness) -> None:
    await add_entries(harness, 2)
    await audit_chain.seal_entries(harness.db)
    async with without_triggers(harness) as session:
        await session.execute(text("DELETE FROM audit"))
    body = await verify(harness)
    assert (body["ok"], body["number"]) == (False, None)
    assert "missing" in body["problem"]


async def test_rewritten_chain_lacks_the_hash_that_was_noted(harness: Harness) -> None:
    """Somebody who may write every table can compute a new chain; a hash that is kept elsewhere tells."""
    await add_entries(harness, 3)
    await audit_chain.seal_entries(harness.db)
    noted = (await verify(harness))["head"]
    await add_entries(harness, 1)
    await audit_chain.seal_entries(harness.db)
    assert (await verify(harness, known_hash=noted))["ok"]
    async with without_triggers(harness) as session:
        await session.execute(text("UPDATE audit SET reason = NULL, chain_hash = NULL, chain_number = NULL"))
        await session.execute(text("DELETE FROM audit_chains"))
    await audit_chain.seal_entries(harness.db)
    assert (await verify(harness))["ok"]
    body = await verify(harness, known_hash=noted)
    assert not body["ok"] and "known_hash" in body["problem"]


async def test_entry_that_is_committed_late_is_sealed_after_later_ones(harness: Harness) -> None:
    project_id = (await harness.policy()).project_id
    for seq in (7, 3):
        async with harness.db.write() as session:
            values = {"actor": "curate", "action": "feedback.skipped", "subject": "fb-1", "details": {}}
            session.add(Audit(seq=seq, project_id=project_id, **values))
        await audit_chain.seal_entries(harness.db)
    rows = await harness.all(Audit)
    assert sorted((row.chain_number, row.seq) for row in rows) == [(1, 7), (2, 3)]
    assert (await verify(harness))["ok"]


async def test_concurrent_writers_and_sealers_give_one_chain(harness: Harness) -> None:
    async def write() -> None:
        for _ in range(5):
            await add_entries(harness, 1)

    async def seal() -> None:
        for _ in range(8):
            await audit_chain.seal_entries(harness.db)

    await asyncio.gather(*(write() for _ in range(4)), *(seal() for _ in range(3)))
    await audit_chain.seal_entries(harness.db)
    body = await verify(harness)
    assert (body["ok"], body["entries"], body["unsealed"]) == (True, 20, 0), body


REFUSED = [
    "UPDATE audit SET actor = 'nobody'",
    "UPDATE audit SET reason = NULL",
    "UPDATE audit SET subject = 'shop@v9'",
    "UPDATE audit SET created_at = 0",
    "UPDATE audit SET seq = seq + 100",
    "UPDATE audit SET project_id = 'another'",
    "UPDATE audit SET chain_number = 5",
    "UPDATE audit SET erased_sha256 = 'x'",
    "UPDATE audit SET reason = NULL, details = '{}', erased_sha256 = 'x'",  # no action that an erasure changes
    "DELETE FROM audit",
]


SEAL_REMOVED = ["UPDATE audit SET chain_hash = NULL", "UPDATE audit SET chain_hash = NULL, chain_number = NULL"]


@pytest.mark.parametrize(
    "statement, sealed", [*product(REFUSED, (False, True)), *((statement, True) for statement in SEAL_REMOVED)]
)
async def test_database_refuses_changes_and_deletions(harness: Harness, statement: str, sealed: bool) -> None:
    await add_entries(harness, 1)
    if sealed:
        await audit_chain.seal_entries(harness.db)
    with pytest.raises(DatabaseError, match="audit entries cannot be"):
        async with harness.db.write() as session:
            await session.execute(text(statement))
    assert len(await list_seqs(harness)) == 1


async def test_postgresql_refuses_to_truncate(harness: Harness) -> None:
    if harness.db.embedded:
        pytest.skip("SQLite has no TRUNCATE")
    await add_entries(harness, 1)
    with pytest.raises(DatabaseError, match="audit entries cannot be"):
        async with harness.db.write() as session:
            await session.execute(text("TRUNCATE audit"))
    assert len(await list_seqs(harness)) == 1


async def block_and_erase(harness: Harness, *, seal_first: bool) -> dict[str, Any]:
    """Return the verification after a rater with an audit entry was erased."""
    await add_entries(harness, 1)
    await harness.api.put(f"/v1/raters/{NAME}", json={"standing": "blocked", "reason": "he is rude"})
    await add_entries(harness, 1)
    if seal_first:
        await audit_chain.seal_entries(harness.db)
    assert (await harness.api.delete(f"/v1/subjects/{NAME.replace('/', '%2F')}")).status_code == 200
    await audit_chain.seal_entries(harness.db)
    return await verify(harness)


@pytest.mark.parametrize("seal_first", [False, True])
async def test_erasure_keeps_the_chain_intact(harness: Harness, seal_first: bool) -> None:
    body = await block_and_erase(harness, seal_first=seal_first)
    assert (body["ok"], body["entries"], body["erased"]) == (True, 4, int(seal_first)), body
    [entry] = [row for row in await harness.all(Audit) if row.action == "rater.blocked"]
    assert (entry.reason, entry.details, len(entry.subject)) == (None, {}, 64)


@pytest.mark.parametrize("column, value", [("reason", "he was kind"), ("details", '{"samples": 0}')])
async def test_erased_entry_cannot_get_new_content(harness: Harness, column: str, value: str) -> None:
    await block_and_erase(harness, seal_first=True)
    statement = text(
        f"UPDATE audit SET {column} = '{value.replace(':', chr(92) + ':')}' WHERE action = 'rater.blocked'"
    )
    with pytest.raises(DatabaseError, match="audit entries cannot be"):
        async with harness.db.write() as session:
            await session.execute(statement)
    async with without_triggers(harness) as session:
        await session.execute(statement)
    body = await verify(harness)
    assert (body["ok"], body["number"]) == (False, 2)


async def test_entry_under_erasure_is_sealed_later(harness: Harness) -> None:
    if harness.db.embedded:
        pytest.skip("SQLite has one writer")
    await add_entries(harness, 2)
    async with harness.db.write() as session:
        await session.get_one(Audit, 1, with_for_update=True)
        await audit_chain.seal_entries(harness.db)
        assert (await verify(harness))["unsealed"] == 1
    await audit_chain.seal_entries(harness.db)
    body = await verify(harness)
    assert (body["ok"], body["entries"]) == (True, 2)
