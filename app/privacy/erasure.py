"""The erasure of a data subject, in chunks of one transaction each. A repeated request resumes where the last ended.

A chunk has at most CHUNK of the subject's turns, or feedback about at most CHUNK turns: others write between two
chunks. The latest turns come first, so that every turn goes before the turns that it continues, and what remains after
a crash can still be found by name.

Afterwards the embedded database's files are purged: deleted rows are overwritten in place, and the WAL is emptied.
PostgreSQL keeps deleted rows until it vacuums (docs/operating.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import load_only

from app.core.database import Database
from app.core.settings import Settings
from app.models import Audit, AuditAction, Turn, record_audit
from app.privacy import lineage, row_deletion
from app.privacy.subjects import SubjectNames, SubjectRecords, find_records
from app.training import unlearning

CHUNK = 50
PURGE_TIMEOUT_MS = 2000


@dataclass
class ErasureResult:
    """The numbers of rows that were erased, the refused batches, and what had learned from the subject.

    `versions` are the ids of the versions whose own batch had it; `reward_models` are names.
    """

    turns: int = 0
    feedback: int = 0
    rewards: int = 0
    pins: int = 0
    batches: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    reward_models: list[str] = field(default_factory=list)

    def add(self, chunk: "ErasureResult") -> None:
        """Add the numbers, and append the lists; a version or a reward model may be in several chunks."""
        for name, value in vars(chunk).items():
            setattr(self, name, getattr(self, name) + value)


class Chunk(NamedTuple):
    """The subject's turns and feedback that one transaction erases."""

    turn_ids: Sequence[str] = ()
    seqs: Sequence[int] = ()


async def erase_subject(db: Database, names: SubjectNames, settings: Settings, *, actor: str) -> ErasureResult | None:
    """Erase the subject. Returns None when there are no records of it and there never was an erasure."""
    result = ErasureResult()
    async with db.read() as session:
        records = await find_records(session, names)
        if not records and not await _was_erased(session, names):
            return None
    while records:
        async with db.read() as session:
            chunks = await _divide(session, records)
        for chunk in chunks:
            erase = partial(_erase_chunk, names=names, chunk=chunk, settings=settings, actor=actor)
            result.add(await db.retry_on_deadlock(erase))
            await db.let_others_write()
        async with db.read() as session:
            records = await find_records(session, names)
    return result


async def _divide(session: AsyncSession, records: SubjectRecords) -> list[Chunk]:
    """Return the chunks of an erasure. Feedback about a long conversation is a chunk of its own."""
    chunks = [Chunk(turn_ids=records.turns[start : start + CHUNK]) for start in range(0, len(records.turns), CHUNK)]
    num_turns = await lineage.count_feedback_turns(session, records.feedback)
    seqs, size = list[int](), 0
    for seq in records.feedback:
        if seqs and size + num_turns.get(seq, 0) > CHUNK:
            chunks.append(Chunk(seqs=seqs))
            seqs, size = [], 0
        seqs.append(seq)
        size += num_turns.get(seq, 1)
    chunks += [Chunk(seqs=seqs)] if seqs else []
    return chunks or [Chunk()]  # of a subject of whom there are only pins, or a rater


async def _was_erased(session: AsyncSession, names: SubjectNames) -> bool:
    """Whether a subject of this id was erased before."""
    erased = exists().where(
        Audit.project_id == names.project_id, Audit.action == AuditAction.SUBJECT_ERASED, Audit.subject == names.sha256
    )
    return bool(await session.scalar(select(erased)))


async def _erase_chunk(
    session: AsyncSession, names: SubjectNames, chunk: Chunk, settings: Settings, actor: str
) -> ErasureResult:
    """Erase these turns and this feedback in one transaction, with the subject's raters and pins.

    Locks are taken in the order of assembling, training and curating: policies, feedback, rewards, raters, batches,
    samples.
    """
    turn_ids, seqs = chunk
    policies = await unlearning.lock_policies_and_turns(session, names.project_id, turn_ids)
    columns = load_only(Turn.id, Turn.project_id, Turn.state, Turn.parent_id, Turn.conversation_id, Turn.episode_id)
    existing = select(Turn).where(Turn.id.in_(turn_ids), Turn.deleted_at.is_(None)).options(columns)
    turns = list(await session.scalars(existing))
    own = {turn.id for turn in turns}
    ended = await row_deletion.find_ended(session, names.project_id, turns)
    feedback = await row_deletion.lock_feedback(session, names.project_id, turn_ids, seqs, ended)
    kinds = await lineage.list_reward_kinds(session, names.project_id, settings)
    rated = await lineage.find_feedback_turns(session, [row.seq for row in feedback if row.kind in kinds])
    rated |= dict.fromkeys(own, 0.0)  # the subject's turns count whenever they were trained on
    others = rated.keys() - own
    discounted = await lineage.find_discounted_turns(session, rated, settings) - rated.keys()
    result = ErasureResult(turns=len(turns), feedback=len(feedback))
    result.rewards = await row_deletion.delete_rewards(session, names, own, others)
    await row_deletion.empty_judgements(session, own, {turn.parent_id for turn in turns if turn.parent_id} - own)
    await row_deletion.delete_feedback(session, names.project_id, feedback, others)
    await row_deletion.delete_raters(session, names, turns, ended.conversations)
    result.pins = await row_deletion.delete_pins(session, names, ended.conversations)
    result.batches = await unlearning.unlearn_turns(session, policies, own, others | discounted)
    learned_from = rated | dict.fromkeys(discounted, 0.0)
    result.versions = sorted(await lineage.versions_trained_on_turns(session, learned_from))
    await unlearning.mark_tainted(session, result.versions)
    result.reward_models = sorted(set(await unlearning.unlearn_reward_models(session, policies, rated, settings)))
    await row_deletion.erase_turns(session, names.project_id, turns, ended)
    await row_deletion.delete_mentions(session, names, others)
    action = AuditAction.SUBJECT_ERASED
    record_audit(session, actor, action, names.sha256, project_id=names.project_id, **vars(result))
    return result


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
