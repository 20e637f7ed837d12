"""The curate stage: feedback → rewards and samples; finished turns → judgements and rollouts."""

import logging
import random
import time
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, exists, func, or_, select, update
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, aliased

from app.core.database import Database
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import AuditAction, Feedback, FeedbackRank, Policy, Turn, TurnState, record_audit
from app.projects import usage
from app.training.policy_config import effective_rewards
from workers.feedback import rewards, signals
from workers.feedback.signals import FinishedTurn
from workers.judging import judge
from workers.rollouts import chat_rollouts

log = logging.getLogger("attune.curate")
PAGE_SIZE = 500
DISCOUNTED_PAGE_SIZE = 64  # where each feedback event may change a whole conversation
MAX_PAGE_CONVERSATIONS = 20  # each may have hundreds of turns
RUN_SECONDS = 5.0
DATABASE_ERRORS = (OperationalError, InterfaceError, InternalError, PoolTimeout)  # not caused by the feedback


class FeedbackFailed(Exception):
    """The feedback with these sequence numbers could not be processed. `__cause__` says why."""

    def __init__(self, seqs: list[int]) -> None:
        super().__init__(f"feedback {seqs}")
        self.seqs = seqs


class FeedbackPage(NamedTuple):
    """Unprocessed feedback by sequence number, and its turns in order of creation. `is_last`: nothing else waits."""

    seqs: list[int]
    turns: list[FinishedTurn]
    is_last: bool


async def curate(db: Database, settings: Settings) -> int:
    """Process new feedback and finished turns. Returns the number of feedback events that were read.

    After RUN_SECONDS the task is enqueued again, so that other tasks of the same worker can run.
    """
    total, start = 0, time.monotonic()
    while True:
        try:
            num_read, is_last = await _process_page(db, settings, PAGE_SIZE)
        except FeedbackFailed:
            log.exception("a page of feedback failed; its events are read one by one")
            num_read, is_last = await _process_one_by_one(db, settings), False
        num_turns = await _process_turns(db, settings)
        total += num_read
        if is_last and num_turns == 0:
            return total
        if time.monotonic() - start > RUN_SECONDS:
            async with db.write() as session:
                enqueue_after_commit(session, "curate")
            return total


async def _process_page(db: Database, settings: Settings, limit: int) -> tuple[int, bool]:
    """Return the number of feedback events that were read, and whether they were the last ones.

    Raises FeedbackFailed, and DATABASE_ERRORS unchanged.
    """
    seqs: list[int] = []

    async def process(session: AsyncSession) -> tuple[int, bool]:
        nonlocal seqs
        has_discount = settings.rewards.discount > 0 or await session.scalar(
            select(exists().where(Policy.rewards.is_not(None)))
        )
        page = await _read_page(session, min(limit, DISCOUNTED_PAGE_SIZE) if has_discount else limit)
        seqs = page.seqs
        if seqs:
            await rewards.update_rewards(session, page.turns, settings)
            await session.execute(update(Feedback).where(Feedback.seq.in_(seqs)).values(processed=True))
            enqueue_after_commit(session, "assemble")
        return len(seqs), page.is_last

    try:
        return await db.retry_on_deadlock(process)
    except DATABASE_ERRORS:
        raise
    except Exception as error:
        raise FeedbackFailed(seqs) from error


async def _process_one_by_one(db: Database, settings: Settings) -> int:
    """Skip the feedback events that fail, with the reason on record, and process the others."""
    total = 0
    for _ in range(PAGE_SIZE):
        try:
            num_read, _ = await _process_page(db, settings, 1)
        except FeedbackFailed as failure:
            if not failure.seqs:  # nothing could be read, so nothing can be skipped
                raise
            cause = failure.__cause__
            async with db.write() as session:
                await _skip(session, failure.seqs, f"{type(cause).__name__}: {cause}")
            num_read = len(failure.seqs)
        total += num_read
        if num_read == 0:
            break
    return total


async def _process_turns(db: Database, settings: Settings) -> int:
    """Process finished turns, in a transaction of their own: their failure does not concern the feedback.

    If it fails, each project has a transaction, so that one whose turns fail holds up no other. Returns their number.
    """
    try:
        async with db.write() as session:
            return await process_finished_turns(session, PAGE_SIZE, settings)
    except DATABASE_ERRORS:
        raise
    except Exception:
        log.exception("finished turns failed; they are processed project by project")
    async with db.read() as session:
        project_ids = await _list_projects(session, Turn.project_id, ~Turn.processed)
    total = 0
    for project_id in project_ids:
        try:
            async with db.write() as session:
                total += await process_finished_turns(session, PAGE_SIZE, settings, project_id)
        except DATABASE_ERRORS:
            raise
        except Exception:
            log.exception("finished turns of project %s could not be processed", project_id)
    return total


async def _read_page(session: AsyncSession, limit: int) -> FeedbackPage:
    """Return the oldest unprocessed feedback of each project, the same share of the page for each.

    Feedback about replies that still stream waits for their end.
    """
    open_turn = aliased(Turn)
    ranks_open_turn = exists().where(
        FeedbackRank.feedback_seq == Feedback.seq,
        open_turn.id == FeedbackRank.turn_id,
        open_turn.state == TurnState.OPEN,
    )
    is_about_open_conversation = exists().where(
        Feedback.turn_id.is_(None),
        open_turn.project_id == Feedback.project_id,
        open_turn.conversation_id == Feedback.conversation_id,
        open_turn.state == TurnState.OPEN,
        open_turn.created_at <= Feedback.created_at,  # not the replies that began later
    )
    columns = (Feedback.seq, Feedback.turn_id, Feedback.project_id, Feedback.conversation_id, Feedback.target)
    query = (
        select(*columns)
        .outerjoin(Turn, Turn.id == Feedback.turn_id)
        .where(~Feedback.processed, or_(Turn.id.is_(None), Turn.state != TurnState.OPEN))
        .where(~ranks_open_turn, ~is_about_open_conversation)
        .order_by(Feedback.seq)
    )
    rows, is_cut = await _read_in_turn(session, query, Feedback.project_id, ~Feedback.processed, limit)
    page: list[Any] = []
    conversations: set[tuple[str, str]] = set()
    for row in rows:
        if row.turn_id is None and row.conversation_id is not None:
            if len(conversations) == MAX_PAGE_CONVERSATIONS:
                is_cut = True
                break
            conversations.add((row.project_id, row.conversation_id))
        page.append(row)
    targets = {(row.project_id, row.target) for row in page if row.turn_id is None}
    turn_ids = {row.turn_id for row in page if row.turn_id is not None}
    turn_ids |= await signals.read_ranked_turn_ids(session, targets)
    turns = await signals.read_finished_turns(session, turn_ids)
    turns += await signals.read_conversations(session, conversations)
    return FeedbackPage([row.seq for row in page], signals.in_order(turns), is_last=not is_cut)


async def _read_in_turn(
    session: AsyncSession,
    query: Select[*tuple[Any, ...]],
    project: InstrumentedAttribute[str],
    is_waiting: ColumnElement[bool],
    limit: int,
) -> tuple[list[Any], bool]:
    """Return at most `limit` rows of a query, the same share of each project, and whether more rows may be left.

    So the backlog of one project delays no other one by more than a page.

    Args:
        project: The column of the project, with which a partial index begins whose condition is `is_waiting`.
    """
    projects = await _list_projects(session, project, is_waiting)
    share = max(1, limit // max(1, len(projects)))
    rows: list[Any] = []
    is_cut = False
    for project_id in random.sample(projects, len(projects)):
        if len(rows) == limit:
            return rows, True
        found = (await session.execute(query.where(project == project_id).limit(min(share, limit - len(rows))))).all()
        rows += found
        is_cut = is_cut or len(found) == share
    return rows, is_cut or len(rows) == limit


async def _list_projects(
    session: AsyncSession, project: InstrumentedAttribute[str], is_waiting: ColumnElement[bool]
) -> list[str]:
    """Return the projects with waiting rows. Each is one step in the partial index that begins with `project`."""
    projects: list[str] = []
    last: str | None = ""
    while (last := await session.scalar(select(func.min(project)).where(is_waiting, project > last))) is not None:
        projects.append(last)
    return projects


async def _skip(session: AsyncSession, seqs: list[int], reason: str) -> None:
    """Mark feedback as processed and record why: it failed, and must not block the rest."""
    rows = await session.execute(
        update(Feedback)
        .where(Feedback.seq.in_(seqs), ~Feedback.processed)
        .values(processed=True)
        .returning(Feedback.id, Feedback.project_id)
    )
    for id, project_id in rows.all():
        record_audit(session, "curate", AuditAction.FEEDBACK_SKIPPED, id, reason[:500], project_id=project_id)


async def process_finished_turns(
    session: AsyncSession, limit: int, settings: Settings, project_id: str | None = None
) -> int:
    """Create the judgements and rollouts of at most `limit` finished turns, the same share of each project.

    With `project_id` only those of that project are processed. Their tokens are added to what their projects have
    used. Returns the number of turns.
    """
    query = (
        select(
            *(Turn.id, Turn.policy_id, Turn.parent_id, Turn.exclusion_reason, Turn.deleted_at, Turn.completion_id),
            *(Turn.origin, Turn.state, Turn.choice_index, Turn.finished_at, Turn.shadow_of_id),
            *(Turn.project_id, Turn.num_output_tokens),
        )
        .where(~Turn.processed, Turn.state != TurnState.OPEN)
        .order_by(Turn.finished_at, Turn.id)
        .with_for_update(skip_locked=True, key_share=True)  # new feedback about them need not wait
    )
    if project_id is None:
        turns, _ = await _read_in_turn(session, query, Turn.project_id, ~Turn.processed, limit)
    else:
        turns = list((await session.execute(query.where(Turn.project_id == project_id).limit(limit))).all())
    if not turns:
        return 0
    policies = list(await session.scalars(select(Policy).where(Policy.id.in_({turn.policy_id for turn in turns}))))
    configs = {policy.id: effective_rewards(policy, settings) for policy in policies}
    await judge.create_judgements(session, turns, configs)
    await chat_rollouts.create_group_samples(session, turns, policies, settings)
    await chat_rollouts.create_shadow_replies(session, turns, policies, settings)
    await usage.add_output_tokens(session, turns)
    await session.execute(update(Turn).where(Turn.id.in_([turn.id for turn in turns])).values(processed=True))
    return len(turns)
