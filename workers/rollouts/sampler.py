"""Claims → Replies: one rollout, asked of its engine and settled. Nothing is asked while a transaction is open."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rollouts import idle
from alignment.signals.length_penalty import length_penalty
from app.chat.turn_writer import TurnEnd
from app.core import leases
from app.core.database import Database
from app.core.leases import LeaseLost
from app.core.settings import Settings
from app.inference.capture import Capture
from app.inference.client import BASE_WEIGHTS, EngineClient
from app.inference.errors import AdapterMissing, EngineRefused, EngineUnavailable
from app.inference.pool import EnginePool
from app.inference.request import ChatCall, Sampling
from app.models import (
    DatasetRow,
    Origin,
    Policy,
    Rollout,
    RolloutPlan,
    RolloutState,
    Sample,
    SampleState,
    Turn,
    TurnState,
    Version,
    VersionState,
)
from app.policies import service
from app.training.policy_rewards import rewards_of
from app.training.rollouts.config import rollouts_of
from workers.feedback import consent
from workers.rollouts import record_result, verify
from workers.rollouts.queue import VERSION_GONE, Claim

log = logging.getLogger("attune.rollout")
PRIORITY = -1  # behind chats, which have 0; near enough to them that SGLang does not throw its work away
TRIES = 3  # of a transaction that met another one
NO_CONSENT = "the turn beside it may not be learned from"
GONE_ON = "the reply beside it has been learned from without it"
SHADOW_ENDED = "its version is not in shadow any more"
NOT_WANTED = "the policy does not ask for group samples any more"
OTHER_PROMPT = "its prompt ids are not those of the replies beside it"
DATASET_GONE = "its prompt is gone"
DIED = "its asker did not live to hear the reply, {} times"


class Unwanted(Exception):
    """There is no reason to ask any more."""


class Unanswered(Exception):
    """No reply that can be used: another attempt may bring one."""


class Refused(Exception):
    """No reply, and another attempt would bring none."""


@dataclass(frozen=True)
class Case:
    call: ChatCall
    seconds: float  # to wait for the reply
    plan: RolloutPlan | None
    row: DatasetRow | None
    prompt_ids: list[int] | None  # of the replies beside it, if there is one


class Asking:
    def __init__(self, db: Database, settings: Settings, pool: EnginePool, claim: Claim) -> None:
        self._db, self._settings, self._claim = db, settings, claim
        self._client: EngineClient = pool.at(claim.url)

    async def put(self) -> int:
        """Returns how many rollouts were settled: one or none."""
        claim = self._claim
        try:
            async with leases.keep_renewed(
                self._db, Rollout, claim.id, fence=claim.fence, seconds=self._settings.lease_seconds
            ):
                return await self._put()
        except LeaseLost as lost:
            log.warning("a reply comes too late: %s", lost)
            return 0

    async def _put(self) -> int:
        claim, started = self._claim, time.monotonic()
        try:
            case = await self._brief()
            capture = await self._ask(case)
        except Unwanted as told:
            return await self._close(RolloutState.SKIPPED, str(told))
        except Refused as error:
            return await self._close(RolloutState.FAILED, str(error))
        except Unanswered as error:
            if claim.attempt >= self._settings.max_attempts:
                return await self._close(RolloutState.FAILED, str(error))
            trouble = str(error)
            log.warning("rollout %s, attempt %d: %s", claim.id, claim.attempt, trouble)
            await self._write(
                lambda session: record_result.let_go(session, claim.id, claim.fence, claim.attempt, trouble)
            )
            return 0
        seconds = time.monotonic() - started
        exclusion_reason = capture.exclusion_reason or (
            OTHER_PROMPT if case.prompt_ids not in (None, capture.prompt_ids) else None
        )
        reward, why = (
            (None, exclusion_reason)
            if exclusion_reason is not None or case.plan is None
            else await self._verify(case, capture)
        )
        range_ = self._settings.length_range
        ending = TurnEnd(
            claim.id,
            TurnState.DONE,
            capture,
            exclusion_reason=exclusion_reason,
            length_penalty=length_penalty(len(capture.output_ids), *range_) if range_ and capture.output_ids else None,
        )
        await self._write(
            lambda session: record_result.done(
                session,
                self._settings,
                claim.id,
                claim.fence,
                ending,
                engine=claim.engine,
                tokens=len(capture.output_ids),
                seconds=round(seconds, 3),
                reward=reward,
                reason=why,
            )
        )
        return 1

    async def _brief(self) -> Case:
        """Raises Unwanted, Refused."""
        if self._claim.attempt > self._settings.max_attempts:
            raise Refused(DIED.format(self._settings.max_attempts))
        async with self._db.read() as session:
            rollout = await session.get_one(Rollout, self._claim.id)
            turn = await session.get_one(Turn, self._claim.id)
            policy = await session.get_one(Policy, turn.policy_id)
            version = await session.get_one(Version, turn.version_id)
            if turn.deleted_at is not None:
                raise Unwanted(record_result.DELETED)
            spoken = await self._still_wanted(session, turn, policy, version)
            plan = await session.get(RolloutPlan, rollout.plan_id) if rollout.plan_id is not None else None
            row = None
            if plan is not None:
                row = await session.get(DatasetRow, (plan.dataset_id, rollout.row_number))
                if row is None:
                    raise Unwanted(DATASET_GONE)
            beside = select(Turn.prompt_ids).where(
                Turn.completion_id == turn.completion_id,
                Turn.state == TurnState.DONE,
                Turn.exclusion_reason.is_(None),
                Turn.prompt_ids.is_not(None),
            )
            prompt_ids = await session.scalar(beside.order_by(Turn.choice_index).limit(1))
            if turn.origin == Origin.SHADOW and spoken is not None:
                prompt_ids = spoken.prompt_ids
        call = self._call(turn, policy, version, prompt_ids if spoken is not None else None)
        return Case(call, rollouts_of(policy, self._settings).timeout_seconds, plan, row, prompt_ids)

    async def _still_wanted(self, session: AsyncSession, turn: Turn, policy: Policy, version: Version) -> Turn | None:
        """The chat's turn beside it, if there is to be one. Raises Unwanted for what has changed since it was written
        down: that turn, its sample, consent, the settings; the version's shadow deployment."""
        if turn.origin == Origin.PROMPT_SET:
            return None
        beside = turn.shadow_of_id or turn.completion_id
        spoken = (
            await session.scalars(select(Turn).where(Turn.completion_id == beside, Turn.choice_index == 0))
        ).one_or_none()
        if spoken is None or spoken.deleted_at is not None:
            raise Unwanted(record_result.DELETED)
        if not await consent.given(session, spoken):
            raise Unwanted(NO_CONSENT)
        if turn.origin == Origin.SHADOW:
            if version.state != VersionState.SHADOW:
                raise Unwanted(SHADOW_ENDED)
            return spoken
        if spoken.exclusion_reason is not None:
            raise Unwanted(NO_CONSENT)
        if idle(rollouts_of(policy, self._settings).group_sampling, rewards_of(policy, self._settings)) is not None:
            raise Unwanted(NOT_WANTED)
        sample = await session.get(Sample, spoken.id)
        if sample is not None and sample.state not in (SampleState.OPEN, SampleState.QUARANTINED):
            raise Unwanted(GONE_ON)
        return spoken

    def _call(self, turn: Turn, policy: Policy, version: Version, prompt_ids: list[int] | None) -> ChatCall:
        """As the chat beside it was asked, with its very tokens for a prompt."""
        asked = turn.request_params
        choice = asked.get("tool_choice")
        return ChatCall(
            rid=self._rid(self._claim.attempt),
            messages=turn.messages,
            sampling=Sampling.of(turn.sampling),
            adapter=version.adapter,
            model=service.label(policy, version),
            tools=() if choice == "none" else asked.get("tools", ()),
            tool_choice=choice,
            parallel_tool_calls=asked.get("parallel_tool_calls") is not False,
            response_format=asked.get("response_format"),
            extra_key=version.weights or policy.base_model,
            weights=(version.weights or BASE_WEIGHTS) if self._settings.adaptation == "full" else None,
            prompt_ids=prompt_ids,
            priority=PRIORITY,
        )

    def _rid(self, attempt: int) -> str:
        """Of one attempt: the engine may still be at work on the one before, and knows no two by one name."""
        return f"{self._claim.id[:-2]}{attempt % 100:02d}"

    async def _ask(self, case: Case) -> Capture:
        """Raises Unwanted, Unanswered, Refused."""
        if self._claim.attempt > 1:
            await self._abort(self._rid(self._claim.attempt - 1))
        try:
            async with asyncio.timeout(case.seconds):
                capture = (await self._client.complete(case.call)).capture
        except TimeoutError as error:
            await self._abort(case.call.rid)
            raise Unanswered(f"the engine took more than {case.seconds:g} s") from error
        except asyncio.CancelledError:  # the worker stops: whoever is next asks anew
            await asyncio.shield(self._abort(case.call.rid))
            raise
        except AdapterMissing as error:
            raise Unwanted(VERSION_GONE) from error
        except EngineUnavailable as error:
            raise Unanswered(str(error)) from error
        except EngineRefused as error:
            raise Refused(str(error)) from error
        except Exception as error:
            log.exception("an engine's answer was not understood")
            raise Unanswered("the engine's answer was not understood") from error
        if capture.finish_reason == "abort":  # not ours: we would not have heard of it
            raise Unanswered("the engine broke the reply off")
        return capture

    async def _abort(self, rid: str) -> None:
        with suppress(EngineUnavailable, EngineRefused):
            await self._client.abort(rid)

    async def _verify(self, case: Case, capture: Capture) -> tuple[float | None, str | None]:
        """The verifier's number, or why there is none."""
        assert case.plan is not None and case.row is not None
        try:
            value = await verify.worth(case.plan.verifier, self._settings, case.row.content, capture)
        except verify.Unverified as error:
            return None, str(error)
        return value, None if value is not None else "the verifier had nothing to say"

    async def _close(self, state: RolloutState, reason: str) -> int:
        claim = self._claim
        await self._write(
            lambda session: record_result.closed(session, self._settings, claim.id, claim.fence, state, reason)
        )
        return 1

    async def _write(self, write: Callable[[AsyncSession], Awaitable[None]]) -> None:
        for left in range(TRIES - 1, -1, -1):
            try:
                async with self._db.write() as session:
                    await write(session)
                return
            except (IntegrityError, OperationalError):
                if not left:
                    raise
