"""Counts the votes whose outcome is settled into totals, so that no page counts the votes of all time."""

import random
import time
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import null, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, dialect_insert
from app.core.planner import prefer_indexes
from app.core.run_each import run_each
from app.core.settings import Settings
from app.feedback.outcome_reasons import REASONS, Reason, state_of
from app.feedback.outcomes import BATCH_CONDITIONS, BY_SEQ, DECIDING_STATES, to_code
from app.models import Batch, Feedback, Project, SampleState, SourceKind, Version, VoteCursor, VoteTotal
from app.training.vote_totals import IS_UNCOUNTED_VOTE

PAGE_SIZE = 1000
RUN_SECONDS = 1.0
UNSETTLED_STATES = (SampleState.OPEN, SampleState.QUARANTINED, SampleState.BATCHED)


class TotalKey(NamedTuple):
    """What a VoteTotal is for."""

    policy_id: str
    reason: Reason
    is_person: bool


async def count_settled_votes(db: Database, settings: Settings) -> int:
    """Count the settled votes of each project into totals, for at most RUN_SECONDS. Return the number of votes.

    Votes that wait are passed over. A backlog, as after an upgrade, is counted in the runs that follow.
    """
    async with db.read() as session:
        project_ids = list(await session.scalars(select(Project.id).order_by(Project.id)))
    end = time.monotonic() + RUN_SECONDS

    async def count_project(project_id: str) -> int:
        total = 0
        while count := await _count_page(db, project_id):
            total += count
            if count < PAGE_SIZE // 2 or time.monotonic() > end:
                break
        return total

    return await run_each(random.sample(project_ids, len(project_ids)), count_project, "counting the votes of")


async def _count_page(db: Database, project_id: str) -> int:
    """Count the settled votes of the next page; return how many."""
    async with db.read() as session:
        start = await session.scalar(select(VoteCursor.seq).where(VoteCursor.project_id == project_id)) or 0
        seqs = await _read_page(session, project_id, start)
        settled = await _find_settled(session, project_id, seqs)
    # A project whose votes all fit in a page begins at the first one each time, and nothing is written.
    end = seqs[-1] if len(seqs) == PAGE_SIZE else 0
    if not settled and end == start:
        return 0
    count = partial(_record, project_id=project_id, seqs=[seq for page in settled.values() for seq in page], end=end)
    return await db.retry_on_deadlock(count)


async def _read_page(session: AsyncSession, project_id: str, start: int) -> list[int]:
    query = select(Feedback.seq).where(Feedback.project_id == project_id, IS_UNCOUNTED_VOTE, Feedback.seq > start)
    return list(await session.scalars(query.order_by(Feedback.seq).limit(PAGE_SIZE)))


async def _find_settled(session: AsyncSession, project_id: str, seqs: list[int]) -> dict[TotalKey, list[int]]:
    """Return those of the votes whose outcome is settled, by the total that they belong to.

    The others wait for something. So does a vote that the rewards do not use while its reply is not learned from yet:
    then its outcome may become that of the reply. Votes on replies of which no row is left have no policy.
    """
    settled: dict[TotalKey, list[int]] = defaultdict(list)
    if not seqs:
        return settled
    await prefer_indexes(session)
    # The batch alone decides for the votes in one, which are most.
    in_batch: Any = (
        select(Feedback.seq, Feedback.source_kind, Batch.policy_id, to_code(BATCH_CONDITIONS).label("code"))
        .join(Batch, Batch.id == Feedback.batch_id)
        .outerjoin(Version, Version.id == Batch.version_id)
        .where(Feedback.seq.in_(seqs), Batch.state.in_(DECIDING_STATES))
        .add_columns(null().label("sample_state"))
    )
    rows = list(await session.execute(in_batch))
    others = set(seqs).difference(row.seq for row in rows)
    if others:
        rows += await session.execute(BY_SEQ, {"project_id": project_id, "seqs": sorted(others)})
    for row in rows:
        reason = REASONS[row.code]
        is_open = reason == Reason.NOT_USED and row.sample_state in UNSETTLED_STATES
        if state_of(reason) != "waiting" and not is_open and row.policy_id is not None:
            settled[TotalKey(row.policy_id, reason, row.source_kind == SourceKind.HUMAN)].append(row.seq)
    return settled


async def _record(session: AsyncSession, *, project_id: str, seqs: list[int], end: int) -> int:
    """Count these votes, as their outcomes are once they are locked, and move the cursor."""
    query = select(Feedback.seq).where(Feedback.seq.in_(seqs), Feedback.vote_total_id.is_(None)).order_by(Feedback.seq)
    locked = list(await session.scalars(query.with_for_update(skip_locked=True)))
    settled = await _find_settled(session, project_id, locked)
    for key, counted in sorted(settled.items()):
        insert = dialect_insert(session, VoteTotal).values(**key._asdict(), num_votes=len(counted))
        upsert = insert.on_conflict_do_update(
            index_elements=["policy_id", "reason", "is_person"],
            set_={"num_votes": VoteTotal.num_votes + insert.excluded.num_votes},
        )
        id = await session.scalar(upsert.returning(VoteTotal.id))
        await session.execute(update(Feedback).where(Feedback.seq.in_(counted)).values(vote_total_id=id))
    cursor = dialect_insert(session, VoteCursor).values(project_id=project_id, seq=end)
    await session.execute(cursor.on_conflict_do_update(index_elements=["project_id"], set_={"seq": end}))
    return sum(map(len, settled.values()))
