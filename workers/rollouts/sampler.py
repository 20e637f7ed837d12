"""The rollout stage: claimed rollouts → replies, sampled from engines that have capacity left by chats."""

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import VERIFIER
from alignment.signals.combine_rewards import group_sampling_disabled_reason
from alignment.signals.rules import length_penalty
from app.chat.histories import Messages, count_common, read_messages, read_prompt_ids
from app.chat.turn_writer import FINISH_TURNS, TurnEnd
from app.core.database import Database
from app.core.errors import BadRequest
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.engines.adaptation import adaptation_of
from app.inference.capture import Capture
from app.inference.engine import EngineClient
from app.inference.keys import load_engine_keys
from app.inference.output_length import limit_to_room
from app.inference.pool import EnginePool
from app.inference.request import BELOW_CHATS, ChatCall, Sampling
from app.inference.transport import AdapterMissing, EngineRefused, EngineUnavailable
from app.models import (
    DatasetRow,
    Engine,
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
from app.policies import references
from app.projects.service import has_training_consent
from app.training.policy_config import effective_rewards, effective_rollouts
from workers.feedback import rewards, sample_groups
from workers.queue.leased_job import AttemptFailed, JobFailed, JobSkipped, LeasedJob, finish_row, run_jobs
from workers.rollouts import prompt_sets
from workers.rollouts.rollout_queue import VERSION_GONE, claim_rollouts, close_rollout, skip_expired

log = logging.getLogger("attune.rollout")
POLL_SECONDS = 0.5  # how often new rollouts are claimed while others run
# Why a rollout is skipped, or its reply excluded.
DELETED = "the turn is deleted"
NO_CONSENT = "the chat turn of its group must not be trained on"
ALREADY_TRAINED = "the chat turn of its group was trained on without it"
SHADOW_ENDED = "its version is not in a shadow deployment any more"
GROUP_SAMPLING_OFF = "group sampling of the policy is off now"
PROMPT_MISMATCH = "its prompt ids differ from those of its group"
PROMPT_DELETED = "its prompt was deleted"
NO_OPINION = "the verifier has no opinion"


@dataclass(frozen=True)
class RolloutRequest:
    """What one rollout asks of its engine. Plan and row are those of a prompt set.

    `prompt_ids`: of the other replies to the prompt, if there are any. `history_id`: the turn that has these ids, if
    it is the rollout's history.
    """

    call: ChatCall
    timeout_seconds: float
    plan: RolloutPlan | None
    row: DatasetRow | None
    prompt_ids: list[int] | None
    history_id: str | None


@dataclass(frozen=True)
class RolloutResult:
    """A sampled reply. `reward` is the verifier's; `reason` says why the reply has none.

    `num_history_tokens`: how many of the prompt ids are those of the turn `history_id`.
    """

    capture: Capture
    seconds: float
    exclusion_reason: str | None
    reward: float | None
    reason: str | None
    history_id: str | None
    num_history_tokens: int


class RolloutJob(LeasedJob[Rollout, RolloutResult]):
    """Sample one reply from `engine` and score it with the plan's verifier, if it has one."""

    def __init__(self, db: Database, settings: Settings, pool: EnginePool, rollout: Rollout, engine: Engine) -> None:
        super().__init__(db, settings, [rollout])
        self._rollout, self._engine = rollout, engine.name
        self._client: EngineClient = pool.get(engine)

    async def execute(self) -> RolloutResult:
        start = time.monotonic()
        request = await self._build_request()
        capture = await self._sample(request)
        seconds = round(time.monotonic() - start, 3)
        exclusion_reason = capture.exclusion_reason
        if exclusion_reason is None and request.prompt_ids not in (None, capture.prompt_ids):
            exclusion_reason = PROMPT_MISMATCH
        reward, reason = None, exclusion_reason
        if exclusion_reason is None and request.plan is not None and request.row is not None:
            try:
                reward = await prompt_sets.verify_reply(
                    request.plan.verifier, self.settings, request.row.content, capture
                )
                reason = NO_OPINION if reward is None else None
            except prompt_sets.VerifierError as error:
                reason = str(error)
        num_history_tokens = count_common(request.prompt_ids or [], capture.prompt_ids) if request.history_id else 0
        return RolloutResult(capture, seconds, exclusion_reason, reward, reason, request.history_id, num_history_tokens)

    async def record(self, session: AsyncSession, row: Rollout, result: RolloutResult) -> None:
        """Finish the rollout and its turn, and store the reward. Raises LeaseLost."""
        num_tokens, length_range = len(result.capture.output_ids), self.settings.observability.length_range
        values = {"tokens": num_tokens, "duration_seconds": result.seconds}
        if await sample_groups.lock_and_find_deleted(session, [row.id]):
            await finish_row(session, row, RolloutState.SKIPPED, DELETED, **values)
            return
        await finish_row(session, row, RolloutState.DONE, result.reason, reward=result.reward, **values)
        await session.execute(update(Turn).where(Turn.id == row.id).values(engine=self._engine))
        penalty = length_penalty(num_tokens, *length_range) if length_range and num_tokens else None
        turn_end = TurnEnd(
            row.id,
            TurnState.DONE,
            result.capture,
            exclusion_reason=result.exclusion_reason,
            length_penalty=penalty,
            history_id=result.history_id,
            num_history_tokens=result.num_history_tokens,
        )
        await (await session.connection()).execute(FINISH_TURNS, [turn_end.values()])
        if result.reward is not None:
            await rewards.record_reward(session, row.id, VERIFIER, result.reward)
        await rewards.update_turn_samples(session, {row.id}, self.settings)
        enqueue_after_commit(session, "curate", "rollout")

    async def close(self, session: AsyncSession, row: Rollout, state: str, reason: str) -> None:
        await close_rollout(session, self.settings, row, state, reason)

    def retry_values(self, row: Rollout) -> dict[str, object]:
        return {"tokens": 0}

    async def _build_request(self) -> RolloutRequest:
        """Raises JobSkipped."""
        async with self.db.read() as session:
            turn = await session.get_one(Turn, self._rollout.id)
            policy = await session.get_one(Policy, turn.policy_id)
            version = await session.get_one(Version, turn.version_id)
            if turn.deleted_at is not None:
                raise JobSkipped(DELETED)
            chat_turn = await self._read_chat_turn(session, turn, policy, version)
            plan = row = None
            if self._rollout.plan_id is not None:
                plan = await session.get_one(RolloutPlan, self._rollout.plan_id)
                row = await session.get(DatasetRow, (plan.dataset_id, self._rollout.row_number))
                if row is None:
                    raise JobSkipped(PROMPT_DELETED)
            if turn.origin == Origin.SHADOW and chat_turn is not None:
                group_turn_id: str | None = chat_turn.id
            else:
                group = select(Turn.id).where(
                    Turn.completion_id == turn.completion_id,
                    Turn.state == TurnState.DONE,
                    Turn.exclusion_reason.is_(None),
                    Turn.own_prompt_ids.is_not(None),
                )
                group_turn_id = await session.scalar(group.order_by(Turn.choice_index).limit(1))
            messages = (await read_messages(session, [turn.id])).get(turn.id, [])
            prompt_ids = None
            if group_turn_id is not None:
                prompt_ids = (await read_prompt_ids(session, [group_turn_id])).get(group_turn_id)
        call = self._build_call(turn, messages, policy, version, prompt_ids if chat_turn is not None else None)
        timeout_seconds = effective_rollouts(policy, self.settings).timeout_seconds
        history_id = turn.history_id if turn.history_id == group_turn_id else None
        return RolloutRequest(call, timeout_seconds, plan, row, prompt_ids, history_id)

    async def _read_chat_turn(self, session: AsyncSession, turn: Turn, policy: Policy, version: Version) -> Turn | None:
        """Return the chat turn that the rollout samples again, None for a prompt set.

        Raises JobSkipped for what changed since the rollout was created: the chat turn, its sample, consent, the
        settings, the version's shadow deployment.
        """
        if turn.origin == Origin.PROMPT_SET:
            return None
        completion_id = turn.shadow_of_id or turn.completion_id
        chat = select(Turn).where(Turn.completion_id == completion_id, Turn.choice_index == 0)
        chat_turn = (await session.scalars(chat)).one_or_none()
        if chat_turn is None or chat_turn.deleted_at is not None:
            raise JobSkipped(DELETED)
        if not await has_training_consent(session, chat_turn):
            raise JobSkipped(NO_CONSENT)
        if turn.origin == Origin.SHADOW:
            if version.state != VersionState.SHADOW:
                raise JobSkipped(SHADOW_ENDED)
            return chat_turn
        if chat_turn.exclusion_reason is not None:
            raise JobSkipped(NO_CONSENT)
        config = effective_rollouts(policy, self.settings).group_sampling
        if group_sampling_disabled_reason(config, effective_rewards(policy, self.settings)) is not None:
            raise JobSkipped(GROUP_SAMPLING_OFF)
        sample = await session.get(Sample, chat_turn.id)
        if sample is not None and sample.state not in (SampleState.OPEN, SampleState.QUARANTINED):
            raise JobSkipped(ALREADY_TRAINED)
        return chat_turn

    def _build_call(
        self, turn: Turn, messages: Messages, policy: Policy, version: Version, prompt_ids: list[int] | None
    ) -> ChatCall:
        """Return the call with the parameters of the chat, and its exact prompt tokens."""
        params = turn.request_params
        adaptation = adaptation_of(self.settings)
        return ChatCall(
            rid=self._request_id(self._rollout.fence),
            messages=messages,
            sampling=Sampling.from_body(turn.sampling),
            target=adaptation.target(version, policy.base_model, references.version_name(policy, version)),
            tools=params.get("tools", ()),
            tool_choice=params.get("tool_choice"),
            parallel_tool_calls=params.get("parallel_tool_calls") is not False,
            response_format=params.get("response_format"),
            prompt_ids=prompt_ids,
            priority=BELOW_CHATS,
        )

    def _request_id(self, fence: int) -> str:
        """Return an id for one claim: the engine may still work on the one before, and ids must be unique there."""
        return f"{self._rollout.id[:-2]}{fence % 100:02d}"

    async def _sample(self, request: RolloutRequest) -> Capture:
        """Raises JobSkipped, AttemptFailed, JobFailed."""
        if self._rollout.fence > 1:
            await self._abort(self._request_id(self._rollout.fence - 1))
        try:
            async with asyncio.timeout(request.timeout_seconds):
                call = await limit_to_room(self._client, request.call)
                capture = (await self._client.complete(call)).capture
        except TimeoutError as error:
            await self._abort(request.call.rid)
            raise AttemptFailed(f"the engine took more than {request.timeout_seconds:g} s") from error
        except asyncio.CancelledError:
            await asyncio.shield(self._abort(request.call.rid))
            raise
        except AdapterMissing as error:
            raise JobSkipped(VERSION_GONE) from error
        except EngineUnavailable as error:
            raise AttemptFailed(str(error)) from error
        except (EngineRefused, BadRequest) as error:
            raise JobFailed(str(error)) from error
        except Exception as error:
            log.exception("an engine's answer could not be parsed")
            raise AttemptFailed("the engine's answer could not be parsed") from error
        if capture.finish_reason == "abort":  # not aborted by this job, which would not have got the reply
            raise AttemptFailed("the engine aborted the reply")
        return capture

    async def _abort(self, request_id: str) -> None:
        with suppress(EngineUnavailable, EngineRefused):
            await self._client.abort(request_id)


async def sample_rollouts(db: Database, settings: Settings, owner: str) -> int:
    """Sample rollouts until no engine has capacity or none is left. Returns the number that reached a final state."""
    async with EnginePool(load_engine_keys(settings), read_timeout=settings.server.chat_timeout_seconds) as pool:

        async def claim_jobs(running: Collection[RolloutJob]) -> list[RolloutJob]:
            try:
                await skip_expired(db, settings)
                await prompt_sets.advance_plans(db, settings)
                claimed = await claim_rollouts(db, settings, owner)
            except SQLAlchemyError:
                if not running:
                    raise
                log.exception("no new rollouts are claimed for now")  # the running ones must not fail with it
                return []
            return [RolloutJob(db, settings, pool, rollout, engine) for rollout, engine in claimed]

        return await run_jobs(db, "rollout", claim_jobs, poll_seconds=POLL_SECONDS)
