"""Rollouts → Turns: replies that the learner asks for itself, while people leave the engines room."""

import asyncio
import logging
import time

from sqlalchemy.exc import SQLAlchemyError

from app.core.database import Database
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.inference.keys import engine_keys
from app.inference.pool import EnginePool
from workers.queue.retry import spared
from workers.rollouts import prompt_sets, queue
from workers.rollouts.sampler import Asking

log = logging.getLogger("attune.rollout")
LOOK_SECONDS = 0.5  # while replies are waited for, there may be room for more
RUN_SECONDS = 30.0  # then the bell is rung again: a worker that is to stop must come to an end


async def roll_out(db: Database, settings: Settings, owner: str) -> int:
    """Ask for what there is room for, until there is none. Returns how many rollouts were settled."""
    until = time.monotonic() + RUN_SECONDS
    running: set[asyncio.Task[int]] = set()
    pool = EnginePool(engine_keys(settings), patience=settings.chat_timeout_seconds)
    settled = 0
    try:
        while True:
            over = time.monotonic() > until
            if not over:
                try:
                    await queue.drop(db, settings)
                    await prompt_sets.advance(db, settings)
                    claims = await queue.take(db, settings, owner)
                except SQLAlchemyError:
                    if not running:
                        raise
                    log.exception("no new rollouts for the moment")  # those under way need not pay for it
                    claims = []
                running |= {asyncio.create_task(Asking(db, settings, pool, claim).put()) for claim in claims}
            if not running:
                break
            ended, running = await asyncio.wait(running, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for work in ended:  # of one that failed the lease runs out, and it is asked for again
                settled += await spared(work, log, "a rollout could not be settled")
    finally:
        for work in running:
            work.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await pool.close()
    if over:
        async with db.write() as session:
            enqueue_after_commit(session, "rollout")
    return settled
