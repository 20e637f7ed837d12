"""The erasure of a data subject, in chunks of one transaction each. A repeated request resumes where the last ended.

A chunk has at most CHUNK turns and CHUNK feedback events. The latest turns come first, so that every turn goes before
the turns that it continues, and what remains after a crash can still be found by name.

Afterwards the embedded database's files are purged: deleted rows are overwritten in place, and the WAL is emptied.
PostgreSQL keeps deleted rows until it vacuums (docs/operating.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import load_only

from app.core.database import Database
from app.core.settings import Settings
from app.models import AuditAction, Turn, record_audit
from app.privacy import repository, row_deletion
from app.privacy.identities import SubjectNames
from app.privacy.lineage import repository as lineage
from app.privacy.repository import SubjectRecords
from app.training import unlearning

CHUNK = 200
PURGE_TIMEOUT_MS = 2000


@dataclass
class ErasureResult:
    """What was erased, and the versions whose own batch had it.

    `purged` is whether the database's files hold no copy any more.
    """

    turns: int = 0
    feedback: int = 0
    rewards: int = 0
    pins: int = 0
    batches: list[str] = field(default_factory=list)
    version_ids: set[str] = field(default_factory=set)
    reward_models: set[str] = field(default_factory=set)
    purged: bool = True

    def add(self, chunk: "ErasureResult") -> None:
        self.turns += chunk.turns
        self.feedback += chunk.feedback
        self.rewards += chunk.rewards
        self.pins += chunk.pins
        self.batches += chunk.batches
        self.version_ids |= chunk.version_ids
        self.reward_models |= chunk.reward_models


async def erase_subject(db: Database, names: SubjectNames, settings: Settings, *, actor: str) -> ErasureResult | None:
    """Erase the subject. Returns None when there are no records of it and there never was an erasure."""
    result = ErasureResult()
    async with db.read() as session:
        records = await repository.find_records(session, names)
        has_others = await repository.has_other_records(session, names)
        erased_at = await repository.last_erased_at(session, names)
    if not records and not has_others and erased_at is None:
        return None
    chunks = list(_split(records)) or ([SubjectRecords([], [])] if has_others else [])
    while chunks:
        for chunk in chunks:

            async def erase(session: AsyncSession, chunk: SubjectRecords = chunk) -> ErasureResult:
                return await _erase_chunk(session, names, chunk, settings, actor)

            result.add(await db.retry_on_deadlock(erase))
        async with db.read() as session:
            chunks = list(_split(await repository.find_records(session, names)))
    result.purged = await purge_deleted(db)
    return result


def _split(records: SubjectRecords) -> Iterator[SubjectRecords]:
    turns = [records.turns[start : start + CHUNK] for start in range(0, len(records.turns), CHUNK)]
    feedback = [records.feedback[start : start + CHUNK] for start in range(0, len(records.feedback), CHUNK)]
    for turn_ids, seqs in zip_longest(turns, feedback):
        yield SubjectRecords(turn_ids or [], seqs or [])


async def _erase_chunk(
    session: AsyncSession, names: SubjectNames, chunk: SubjectRecords, settings: Settings, actor: str
) -> ErasureResult:
    """Erase one chunk in one transaction.

    Locks are taken in the order of assembling, training and curating: policies, feedback, rewards, raters, batches,
    samples.
    """
    await unlearning.lock_policies_and_turns(session, names.project_id, chunk.turns)
    feedback = await repository.lock_feedback(session, names, chunk.turns, chunk.feedback)
    turns = await _load_turns(session, chunk.turns)
    ids = {turn.id for turn in turns}
    kinds = await lineage.list_reward_kinds(session, names.project_id, settings)
    rated = await lineage.find_feedback_turns(session, [row for row in feedback if row.kind in kinds])
    rated |= dict.fromkeys(ids, 0.0)  # the subject's turns count whenever they were trained on
    others = rated.keys() - ids
    discounted = await lineage.find_discounted_turns(session, rated.keys(), settings) - rated.keys()
    result = ErasureResult(turns=len(turns), feedback=len(feedback))
    result.rewards = await row_deletion.delete_rewards(session, names, ids, others)
    await row_deletion.empty_judgements(session, ids, {turn.parent_id for turn in turns if turn.parent_id} - ids)
    await row_deletion.delete_feedback(session, names.project_id, feedback, others)
    ended = await row_deletion.find_ended_conversations(session, names.project_id, turns)
    await row_deletion.delete_raters(session, names, turns, ended)
    result.pins = await row_deletion.delete_pins(session, names, ended)
    result.batches = await unlearning.unlearn_turns(session, ids, others | discounted)
    result.version_ids = await lineage.versions_trained_on_turns(session, {**rated, **dict.fromkeys(discounted, 0.0)})
    await unlearning.mark_tainted(session, result.version_ids)
    result.reward_models = set(await unlearning.unlearn_reward_models(session, rated, settings))
    await row_deletion.erase_turns(session, names.project_id, turns)
    await row_deletion.delete_mentions(session, names, others)
    record_audit(
        session,
        actor,
        AuditAction.SUBJECT_ERASED,
        names.sha256,
        project_id=names.project_id,
        turns=result.turns,
        feedback=result.feedback,
        rewards=result.rewards,
        pins=result.pins,
        batches=result.batches,
        versions=sorted(result.version_ids),
        reward_models=sorted(result.reward_models),
    )
    return result


async def _load_turns(session: AsyncSession, ids: Sequence[str]) -> list[Turn]:
    columns = load_only(Turn.id, Turn.project_id, Turn.state, Turn.parent_id, Turn.conversation_id)
    return list(await session.scalars(select(Turn).where(Turn.id.in_(ids), Turn.deleted_at.is_(None)).options(columns)))


async def purge_deleted(db: Database) -> bool:
    """Remove deleted rows from the embedded database's WAL.

    Returns False when other connections were too busy; then the request must be repeated.
    """
    if not db.embedded:
        return True
    async with db.engine.connect() as connection:
        raw = (await connection.get_raw_connection()).driver_connection
        assert raw is not None
        timeout_ms = (await (await raw.execute("PRAGMA busy_timeout")).fetchone())[0]
        try:
            await raw.execute(f"PRAGMA busy_timeout = {PURGE_TIMEOUT_MS}")
            busy, _, _ = await (await raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")).fetchone()
        finally:
            await raw.execute(f"PRAGMA busy_timeout = {timeout_ms}")
    return not busy
