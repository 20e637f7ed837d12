"""The judge stage: judgements → rewards. Each is recorded once, under its fence, in one transaction with its reward."""

import time
from collections import Counter
from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

import httpx2
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import NextTurnSource
from alignment.signals.rules import NeedsNextMessage
from app.core.database import Database
from app.core.settings import Settings
from app.models import Judgement, JudgementState
from workers.feedback import rater_trust, rewards, sample_groups, signals
from workers.judging.http_client import open_client
from workers.judging.judgement_queue import SourceKey, claim_judgements
from workers.judging.request import DELETED, NO_REPLY, Answer, Usage, build_request
from workers.judging.sources import Answers, get_answers
from workers.queue.leased_job import (
    AttemptFailed,
    JobPostponed,
    JobSkipped,
    LeasedJob,
    finish_row,
    run_jobs,
    sanitize_text,
)

POLL_SECONDS = 1.0  # how often new judgements are claimed while others run
SOURCE_PAUSE_SECONDS = 5.0  # of a source that did not answer, so that others get its capacity


class JudgementJob(LeasedJob[Judgement, Answers]):
    """One question to one source: about one judgement, or about replies that are compared with each other."""

    def __init__(
        self,
        db: Database,
        settings: Settings,
        judgements: Sequence[Judgement],
        http: httpx2.AsyncClient,
        paused: MutableMapping[SourceKey, float],
    ) -> None:
        """`paused` maps sources that do not answer to the monotonic time of the next attempt."""
        super().__init__(db, settings, judgements)
        self.source_key: SourceKey = (judgements[0].policy_id, judgements[0].source)
        self._http, self._paused = http, paused
        self._usage, self._start, self._is_from_user = Usage(), time.monotonic(), False

    async def execute(self) -> Answers:
        async with self.db.read() as session:
            request = await build_request(session, self.settings, self.rows)
        self._is_from_user = isinstance(request.source, NextTurnSource)
        try:
            return await get_answers(request, self._http, self.settings, self._usage)
        except NeedsNextMessage as error:
            if request.seconds_left > 0:
                raise JobPostponed(request.poll_seconds) from error
            raise JobSkipped(str(error)) from error
        except AttemptFailed:
            self._paused[self.source_key] = time.monotonic() + SOURCE_PAUSE_SECONDS
            raise

    async def record(self, session: AsyncSession, row: Judgement, result: Answers) -> None:
        answer = result.get(row.turn_id)
        if answer is None or await sample_groups.lock_and_find_deleted(session, [row.turn_id]):
            await self.close(session, row, JudgementState.SKIPPED, NO_REPLY)
            return
        rater, weight = None, 1.0
        if self._is_from_user:  # the evidence is the user's next message
            [turn] = await signals.read_finished_turns(session, [row.turn_id])
            rater, weight = signals.end_user_rater(turn), rater_trust.newcomer_trust(self.settings).weight
        await rewards.record_reward(session, row.turn_id, row.source, answer.value, rater=rater, weight=weight)
        await self._finish(session, row, JudgementState.DONE, None, answer)

    async def close(self, session: AsyncSession, row: Judgement, state: str, reason: str) -> None:
        is_deleted = await sample_groups.lock_and_find_deleted(session, [row.turn_id])
        await self._finish(session, row, state, DELETED if is_deleted else reason)

    async def _finish(
        self, session: AsyncSession, row: Judgement, state: str, reason: str | None, answer: Answer | None = None
    ) -> None:
        details = self._details(row)
        if answer is not None and answer.explanation:
            details["explanation"] = sanitize_text(answer.explanation)
        await finish_row(session, row, state, reason, value=answer and answer.value, details=details)
        await rewards.update_turn_samples(session, {row.turn_id}, self.settings)

    def retry_values(self, row: Judgement) -> dict[str, Any]:
        return {"details": self._details(row)}

    def _details(self, row: Judgement) -> dict[str, Any]:
        """Return the requests of all attempts, and the tokens and seconds of this one.

        The first of several judgements that are compared has the usage of all.
        """
        usage = self._usage if row is self.rows[0] else Usage()
        num_requests = row.details.get("requests", 0) + usage.requests
        details: dict[str, Any] = {"requests": num_requests, "seconds": round(time.monotonic() - self._start, 3)}
        return details | ({"tokens": usage.tokens} if usage.tokens else {})


async def judge(db: Database, settings: Settings, owner: str) -> int:
    """Ask the sources of all due judgements. Returns the number of judgements that reached a final state."""
    paused: dict[SourceKey, float] = {}
    async with open_client(settings) as http:

        async def claim_jobs(running: Collection[JudgementJob]) -> list[JudgementJob]:
            excluded = [key for key, end in paused.items() if end > time.monotonic()]
            counts = Counter(job.source_key for job in running)
            claimed = await claim_judgements(db, settings, owner, counts, excluded)
            return [JudgementJob(db, settings, judgements, http, paused) for judgements in claimed]

        return await run_jobs(db, "judge", claim_jobs, poll_seconds=POLL_SECONDS)
