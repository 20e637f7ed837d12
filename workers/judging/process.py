"""Claims → one question, asked and settled. Nothing is asked while a transaction is open."""

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import httpx2
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import NextTurnSource
from alignment.signals.rules import NotYet
from app.core import leases as core_leases
from app.core.database import Database
from app.core.leases import LeaseLost
from app.core.settings import Settings
from app.models import Judgement, JudgementState
from workers.judging import record_result
from workers.judging.build_request import brief
from workers.judging.request import NO_REPLY, Answer, Broken, Claim, JudgeRequest, Meter, Silent, Unanswered
from workers.judging.sources.dispatch import ask

log = logging.getLogger("attune.judge")
WAITS = 6  # how often a rule is asked again within its window
TRIES = 3  # of a transaction that met another one
Writing = Callable[[AsyncSession, Claim, Meter], Awaitable[None]]


class Question:
    """One claim, or those of replies that are compared with one another."""

    def __init__(self, db: Database, settings: Settings, http: httpx2.AsyncClient, claims: tuple[Claim, ...]) -> None:
        self._db, self._settings, self._http, self._claims = db, settings, http, claims
        self._meter, self._started = Meter(), time.monotonic()
        self.unanswered = False

    async def put(self) -> int:
        """Returns how many judgements were settled."""
        async with AsyncExitStack() as leases:
            for claim in self._claims:
                kept = core_leases.keep_renewed(
                    self._db, Judgement, claim.id, fence=claim.fence, seconds=self._settings.lease_seconds
                )
                await leases.enter_async_context(kept)
            return await self._put()

    async def _put(self) -> int:
        case: JudgeRequest | None = None
        try:
            case = await self._brief()
            answers = await ask(case, self._http, self._settings, self._meter)
        except NotYet as error:
            if case is not None and case.window_left > 0:
                return await self._wait(min(case.window_left, max(case.source.window_seconds / WAITS, 1.0)))
            return await self._close(JudgementState.SKIPPED, str(error))
        except Silent as told:
            return await self._close(JudgementState.SKIPPED, str(told))
        except Broken as error:
            return await self._close(JudgementState.FAILED, str(error))
        except Unanswered as error:
            self.unanswered = True
            if self._claims[0].attempt >= self._settings.max_attempts:
                return await self._close(JudgementState.FAILED, str(error))
            return await self._let_go(str(error))
        return await self._done(answers, users_own=isinstance(case.source, NextTurnSource))

    async def _brief(self) -> JudgeRequest:
        if self._claims[0].attempt > self._settings.max_attempts:
            raise Broken(f"its asker did not live to hear the answer, {self._settings.max_attempts} times")
        async with self._db.read() as session:
            return await brief(session, self._settings, self._claims)

    async def _done(self, answers: dict[str, Answer], *, users_own: bool) -> int:
        async def write(session: AsyncSession, claim: Claim, meter: Meter) -> None:
            answer, details = answers.get(claim.turn_id), self._details(claim, meter)
            if answer is None:
                await record_result.closed(session, self._settings, claim, JudgementState.SKIPPED, NO_REPLY, details)
            else:
                await record_result.done(session, self._settings, claim, answer, details, users_own=users_own)

        return await self._each(write)

    async def _close(self, state: JudgementState, reason: str) -> int:
        async def write(session: AsyncSession, claim: Claim, meter: Meter) -> None:
            await record_result.closed(session, self._settings, claim, state, reason, self._details(claim, meter))

        return await self._each(write)

    async def _let_go(self, reason: str) -> int:
        async def write(session: AsyncSession, claim: Claim, meter: Meter) -> None:
            await record_result.let_go(session, claim, reason, self._details(claim, meter))

        await self._each(write)
        return 0

    async def _wait(self, seconds: float) -> int:
        async def write(session: AsyncSession, claim: Claim, meter: Meter) -> None:
            await record_result.wait(session, claim, seconds)

        await self._each(write)
        return 0

    def _details(self, claim: Claim, meter: Meter) -> dict[str, object]:
        return record_result.details_of(claim, meter, time.monotonic() - self._started)

    async def _each(self, write: Writing) -> int:
        """What it cost is booked on the first."""
        settled = 0
        for claim in self._claims:
            try:
                await self._write(write, claim, self._meter if claim is self._claims[0] else Meter())
                settled += 1
            except LeaseLost as lost:
                log.warning("what was heard comes too late: %s", lost)
        return settled

    async def _write(self, write: Writing, claim: Claim, meter: Meter) -> None:
        for left in range(TRIES - 1, -1, -1):
            try:
                async with self._db.write() as session:
                    await write(session, claim, meter)
                return
            except (IntegrityError, OperationalError):
                if not left:
                    raise
