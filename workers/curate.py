"""The curate stage: feedback → rewards and samples; finished turns → judgements and rollouts."""

import logging
import time
from functools import partial

from sqlalchemy import exists, or_, select, update
from sqlalchemy.exc import IntegrityError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import AuditAction, Feedback, Policy, Turn, TurnState, record_audit
from app.projects import usage
from app.training.policy_config import effective_rewards
from workers.feedback import ended_episodes, rewards
from workers.feedback.feedback_pages import PageSize, list_projects, read_in_turn, read_page
from workers.judging import judge
from workers.rollouts import chat_rollouts

log = logging.getLogger("attune.curate")
PAGE_SIZE = PageSize(events=500, rows=5000)
# A page is a write transaction, and with SQLite every chat and vote waits for it.
SQLITE_PAGE_SIZE = PageSize(events=50, rows=250)
DISCOUNTED_EVENTS = 64  # of a page, where each of them may change a whole conversation
MAX_EPISODES = 50  # that have ended, before other work goes on
MAX_TURNS = 500  # that have finished, in a transaction
RUN_SECONDS = 5.0
DATABASE_ERRORS = (OperationalError, InterfaceError, InternalError, PoolTimeout)  # not caused by the feedback


class FeedbackFailed(Exception):
    """The feedback with these sequence numbers could not be processed. `__cause__` says why."""

    def __init__(self, seqs: list[int]) -> None:
        super().__init__(f"feedback {seqs}")
        self.seqs = seqs


async def curate(db: Database, settings: Settings) -> int:
    """Process new feedback and finished turns. Returns the number of feedback events that were read.

    After RUN_SECONDS the task is enqueued again, so that other tasks of the same worker can run.
    """
    total, start = 0, time.monotonic()
    while True:
        try:
            num_read, is_last = await _process_page(db, settings, SQLITE_PAGE_SIZE if db.embedded else PAGE_SIZE)
        except FeedbackFailed:
            log.exception("a page of feedback failed; its events are read one by one")
            num_read, is_last = await _process_one_by_one(db, settings), False
        num_episodes = await _process_ended_episodes(db, settings)
        num_turns = await _process_turns(db, settings)
        total += num_read
        if is_last and num_turns == 0 and num_episodes == 0:
            return total
        await db.let_others_write()
        if time.monotonic() - start > RUN_SECONDS:
            async with db.write() as session:
                enqueue_after_commit(session, "curate")
            return total


async def _process_page(db: Database, settings: Settings, size: PageSize) -> tuple[int, bool]:
    """Return the number of feedback events that were read, and whether they were the last ones.

    Nothing waits while the page is read. Feedback that comes meanwhile counts, and is processed again on its own page.

    Raises FeedbackFailed, and DATABASE_ERRORS unchanged.
    """
    seqs: list[int] = []
    try:
        async with db.read_snapshot() as session:
            has_own = or_(Policy.rewards.is_not(None), Policy.settings.is_not(None))
            reaches_others = settings.rewards.reaches_other_turns or settings.algorithm.compares_episodes
            if reaches_others or await session.scalar(select(exists().where(has_own))):
                size = size._replace(events=min(size.events, DISCOUNTED_EVENTS), with_groups=True)
            page = await read_page(session, size)
        seqs = page.seqs

        async def process(session: AsyncSession) -> None:
            await rewards.update_rewards(session, page.turns, settings)
            await session.execute(update(Feedback).where(Feedback.seq.in_(seqs)).values(processed=True))
            enqueue_after_commit(session, "assemble")

        if seqs:
            await db.retry_on_deadlock(process)
        return len(seqs), page.is_last
    except DATABASE_ERRORS:
        raise
    except Exception as error:
        raise FeedbackFailed(seqs) from error


async def _process_one_by_one(db: Database, settings: Settings) -> int:
    """Skip the feedback events that fail, with the reason on record, and process the others."""
    total = 0
    for _ in range(PAGE_SIZE.events):
        try:
            num_read, _ = await _process_page(db, settings, PageSize(events=1, rows=1))
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


async def _process_ended_episodes(db: Database, settings: Settings) -> int:
    """Process the ends of episodes, those of a group in one transaction. Returns their number.

    Where one fails, the samples of its turns become ready when its last limit would have ended it. One whose rows
    another transaction has written meanwhile is processed when the reconciler finds it again.
    """
    async with db.read() as session:
        ended = await ended_episodes.find_ended(session, settings, MAX_EPISODES)
    if ended.unaffected:
        async with db.write() as session:
            await ended_episodes.mark_unaffected(session, ended.unaffected)
    count = len(ended.unaffected)
    for ids in ended.together:
        try:
            await db.retry_on_deadlock(partial(ended_episodes.process_ends, ids=ids, settings=settings))
        except DATABASE_ERRORS:
            raise
        except IntegrityError:
            log.warning("the ends of the episodes %s are processed later", ", ".join(ids), exc_info=True)
            continue
        except Exception:
            log.exception("the ends of the episodes %s could not be processed", ", ".join(ids))
            async with db.write() as session:
                await ended_episodes.mark_processed(session, ids)
        count += len(ids)
    return count


async def _process_turns(db: Database, settings: Settings) -> int:
    """Process finished turns, in a transaction of their own: their failure does not concern the feedback.

    If it fails, each project has a transaction, so that one whose turns fail holds up no other. Returns their number.
    """
    try:
        async with db.write() as session:
            return await process_finished_turns(session, MAX_TURNS, settings)
    except DATABASE_ERRORS:
        raise
    except Exception:
        log.exception("finished turns failed; they are processed project by project")
    async with db.read() as session:
        project_ids = await list_projects(session, Turn.project_id, ~Turn.processed)
    total = 0
    for project_id in project_ids:
        try:
            async with db.write() as session:
                total += await process_finished_turns(session, MAX_TURNS, settings, project_id)
        except DATABASE_ERRORS:
            raise
        except Exception:
            log.exception("finished turns of project %s could not be processed", project_id)
    return total


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
        turns, _ = await read_in_turn(session, query, Turn.project_id, ~Turn.processed, limit)
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
