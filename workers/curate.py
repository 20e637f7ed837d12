"""The curate stage: feedback → rewards and samples; finished turns → judgements and rollouts."""

import logging
import time

from sqlalchemy import exists, select, update
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Policy, Turn, TurnState
from app.training.reward_config import effective_rewards
from workers.feedback import inbox, rewards
from workers.judging import judgement_queue
from workers.rollouts import group_sampling, shadow_replies

log = logging.getLogger("attune.curate")
PAGE_SIZE = 500
DISCOUNTED_PAGE_SIZE = 64  # where each feedback event may change a whole conversation
RUN_SECONDS = 5.0
DATABASE_ERRORS = (OperationalError, InterfaceError, InternalError, PoolTimeout)  # not caused by the feedback


async def curate(db: Database, settings: Settings) -> int:
    """Process new feedback and finished turns. Returns the number of feedback events that were read.

    After RUN_SECONDS the task is enqueued again, so that other tasks of the same worker can run.
    """
    total, start = 0, time.monotonic()
    while True:
        try:
            num_read, is_last = await _process_page(db, settings, PAGE_SIZE)
        except DATABASE_ERRORS:
            raise
        except Exception:
            log.exception("a page of feedback failed; its events are read one by one")
            num_read, is_last = await _process_one_by_one(db, settings), False
        async with db.write() as session:  # in a transaction of its own: its failure does not concern the feedback
            num_turns = await process_finished_turns(session, PAGE_SIZE, settings)
        total += num_read
        if is_last and num_turns < PAGE_SIZE:
            return total
        if time.monotonic() - start > RUN_SECONDS:
            async with db.write() as session:
                enqueue_after_commit(session, "curate")
            return total


async def _process_page(db: Database, settings: Settings, limit: int) -> tuple[int, bool]:
    """Return the number of feedback events that were read, and whether they were the last ones."""

    async def process(session: AsyncSession) -> tuple[int, bool]:
        has_discount = settings.rewards.discount > 0 or await session.scalar(
            select(exists().where(Policy.rewards.is_not(None)))
        )
        page = await inbox.read_page(session, min(limit, DISCOUNTED_PAGE_SIZE) if has_discount else limit)
        if page.seqs:
            await rewards.update_rewards(session, page.turns, settings)
            await inbox.mark_processed(session, page.seqs)
            enqueue_after_commit(session, "assemble")
        return len(page.seqs), page.is_last

    return await db.retry_on_deadlock(process)


async def _process_one_by_one(db: Database, settings: Settings) -> int:
    """Skip the feedback events that fail, with the reason on record, and process the others."""
    total = 0
    for _ in range(PAGE_SIZE):
        try:
            num_read, _ = await _process_page(db, settings, 1)
        except DATABASE_ERRORS:
            raise
        except Exception as error:
            async with db.write() as session:
                await inbox.skip_oldest(session, f"{type(error).__name__}: {error}")
            num_read = 1
        total += num_read
        if num_read == 0:
            break
    return total


async def process_finished_turns(session: AsyncSession, limit: int, settings: Settings) -> int:
    """Create the judgements and rollouts of at most `limit` finished turns. Returns the number of turns."""
    turns = list(
        await session.execute(
            select(
                *(Turn.id, Turn.policy_id, Turn.parent_id, Turn.exclusion_reason, Turn.deleted_at, Turn.completion_id),
                *(Turn.origin, Turn.state, Turn.choice_index, Turn.finished_at, Turn.shadow_of_id),
            )
            .where(~Turn.processed, Turn.state != TurnState.OPEN)
            .order_by(Turn.finished_at)
            .limit(limit)
            .with_for_update(skip_locked=True, key_share=True)  # new feedback about them need not wait
        )
    )
    if not turns:
        return 0
    policies = list(await session.scalars(select(Policy).where(Policy.id.in_({turn.policy_id for turn in turns}))))
    configs = {policy.id: effective_rewards(policy, settings) for policy in policies}
    await judgement_queue.create_judgements(session, turns, configs)
    await group_sampling.create_group_samples(session, turns, policies, settings)
    await shadow_replies.create_shadow_replies(session, turns, policies, settings)
    await session.execute(
        update(Turn)
        .where(Turn.id.in_([turn.id for turn in turns]))
        .values(processed=True)
        .execution_options(synchronize_session=False)
    )
    return len(turns)
