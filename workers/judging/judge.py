"""The judge stage: judgements → rewards, by sources that are asked off the request path."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import httpx2
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import NextTurnSource
from alignment.signals.rules import NeedsNextMessage
from app.core.database import Database
from app.core.settings import Settings
from app.models import Judgement, JudgementState
from workers.judging import record_judgement
from workers.judging.judgement_queue import JudgementLease, SourceKey, claim_judgements
from workers.judging.request import NO_REPLY, Answer, Usage, build_request
from workers.judging.sources.dispatch import get_answers
from workers.judging.sources.http_client import open_client
from workers.queue.leased_job import AttemptFailed, JobPostponed, JobSkipped, LeasedJob, Outcome, run_jobs

log = logging.getLogger("attune.judge")
POLL_SECONDS = 1.0  # how often new judgements are claimed while others run
SOURCE_PAUSE_SECONDS = 5.0  # of a source that did not answer, so that others get its capacity


class JudgeResult(NamedTuple):
    """The answers by turn. `is_from_user`: they were read from the user's next message."""

    answers: Mapping[str, Answer]
    is_from_user: bool


class JudgementJob(LeasedJob[JudgementLease, JudgeResult]):
    """One question to one source: about one judgement, or about replies that are compared with each other."""

    model = Judgement

    def __init__(
        self,
        db: Database,
        settings: Settings,
        leases: Sequence[JudgementLease],
        http: httpx2.AsyncClient,
        paused: MutableMapping[SourceKey, float],
    ) -> None:
        """`paused` maps sources that do not answer to the monotonic time of the next attempt."""
        super().__init__(db, settings, leases)
        self.source_key: SourceKey = (leases[0].policy_id, leases[0].source)
        self._http, self._paused = http, paused
        self._usage, self._start = Usage(), time.monotonic()

    async def execute(self) -> JudgeResult:
        async with self.db.read() as session:
            request = await build_request(session, self.settings, self.leases)
        try:
            answers = await get_answers(request, self._http, self.settings, self._usage)
        except NeedsNextMessage as error:
            if request.seconds_left > 0:
                raise JobPostponed(request.poll_seconds) from error
            raise JobSkipped(str(error)) from error
        except AttemptFailed:
            self._paused[self.source_key] = time.monotonic() + SOURCE_PAUSE_SECONDS
            raise
        return JudgeResult(answers, is_from_user=isinstance(request.source, NextTurnSource))

    async def record(self, session: AsyncSession, lease: JudgementLease, result: JudgeResult) -> None:
        answer = result.answers.get(lease.turn_id)
        if answer is None:
            await self.close(session, lease, Outcome.SKIPPED, NO_REPLY)
            return
        details = self._details(lease)
        await record_judgement.record_answer(
            session, self.settings, lease, answer, details, is_from_user=result.is_from_user
        )

    async def close(self, session: AsyncSession, lease: JudgementLease, outcome: Outcome, reason: str) -> None:
        state = JudgementState(outcome)
        await record_judgement.record_no_answer(session, self.settings, lease, state, reason, self._details(lease))

    def retry_values(self, lease: JudgementLease) -> dict[str, object]:
        return {"details": self._details(lease)}

    def _details(self, lease: JudgementLease) -> dict[str, object]:
        """Return the details of one judgement. The first one has the usage of all that are compared."""
        usage = self._usage if lease is self.leases[0] else Usage()
        return record_judgement.build_details(lease, usage, time.monotonic() - self._start)


async def judge(db: Database, settings: Settings, owner: str) -> int:
    """Ask the sources of all due judgements. Returns the number of judgements that reached a final state."""
    paused: dict[SourceKey, float] = {}
    async with open_client(settings) as http:

        async def claim_jobs(running: Collection[JudgementJob]) -> list[JudgementJob]:
            excluded = [key for key, end in paused.items() if end > time.monotonic()]
            counts = Counter(job.source_key for job in running)
            claimed = await claim_judgements(db, settings, owner, counts, excluded)
            return [JudgementJob(db, settings, leases, http, paused) for leases in claimed]

        return await run_jobs(db, "judge", claim_jobs, poll_seconds=POLL_SECONDS, log=log)
