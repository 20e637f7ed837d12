"""Judgements → Rewards: sources that must be asked, asked off the hot path."""

import asyncio
import logging
import time
from collections import Counter

from app.core.database import Database
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from workers.judging.process import Question
from workers.judging.queue import Line, take
from workers.judging.sources.http_client import client
from workers.queue.retry import spared

log = logging.getLogger("attune.judge")
LOOK_SECONDS = 1.0  # while answers are waited for, new questions may come in
RUN_SECONDS = 30.0  # then the bell is rung again: a worker that is to stop must come to an end
REST_SECONDS = 5.0  # of a source that did not answer, so that others get its room


async def judge(db: Database, settings: Settings, owner: str) -> int:
    """Ask every source whose judgement is due. Returns how many were settled."""
    until = time.monotonic() + RUN_SECONDS
    running: dict[asyncio.Task[int], tuple[Line, Question]] = {}
    resting: dict[Line, float] = {}
    settled = 0
    async with client(settings) as http:
        try:
            while True:
                over = time.monotonic() > until
                resting = {line: end for line, end in resting.items() if end > time.monotonic()}
                busy = Counter(line for line, _ in running.values())
                for claims in [] if over else await take(db, settings, owner, busy, resting):
                    question = Question(db, settings, http, claims)
                    line = (claims[0].policy_id, claims[0].source)
                    running[asyncio.create_task(question.put())] = (line, question)
                if not running:
                    break
                ended, _ = await asyncio.wait(running, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for work in ended:
                    line, question = running.pop(work)
                    # Of one that failed the lease runs out, and it is asked again.
                    settled += await spared(work, log, "a judgement could not be settled")
                    if question.unanswered:
                        resting[line] = time.monotonic() + REST_SECONDS
        finally:
            for work in running:
                work.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    if over:
        async with db.write() as session:
            enqueue_after_commit(session, "judge")
    return settled
