"""Judgements → Rewards, where the source is the policy's own reward model: many turns in one forward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED
from alignment.reward_model.dataset import Reply
from alignment.signals.judge_prompts import is_question
from app.core import leases
from app.core.database import Database, now
from app.core.jobs import enqueue_after_commit
from app.core.leases import lease_is_free
from app.core.settings import Settings
from app.models import (
    ApiKey,
    Judgement,
    JudgementState,
    Policy,
    Project,
    Reward,
    RewardModel,
    RewardModelState,
    Turn,
    new_id,
)
from app.projects.bootstrap import base_model
from app.projects.consent import NO_CONSENT
from app.training.policy_rewards import rewards_of
from app.training.reward_models import repository
from workers.feedback import curate, group_samples
from workers.judging.request import DELETED, NO_REPLY, NOT_CONFIGURED, OWN_QUESTION

AT_ONCE = 64
NONE_SERVES = "no reward model serves"
SILENCED = "the reward model is silenced"
LOST = "the trainer did not live to score it"


@dataclass(frozen=True)
class Claimed:
    """Turns of one policy that are ours to score, and the model that scores them. `fences`: by judgement; `turns`: the
    turn of each judgement; `closed`: why a judgement is not to be scored, or failed."""

    policy_id: str
    model: RewardModel | None
    fences: Mapping[str, int]
    turns: Mapping[str, str]
    closed: Mapping[str, tuple[JudgementState, str]]
    replies: Sequence[Reply]


async def claim(db: Database, owner: str, settings: Settings) -> Claimed | None:
    """What has been due the longest, and more of the same policy. Where an earlier attempt ended without a word, one
    alone: a reply that takes the trainer down must not take others with it."""
    async with db.write() as session:
        first = await session.scalar(_due(settings).limit(1))
        if first is None:
            return None
        rows = [first]
        if first.attempt == 0:
            fresh = _due(settings).where(Judgement.policy_id == first.policy_id, Judgement.attempt == 0)
            rows = list(await session.scalars(fresh.limit(AT_ONCE)))
        taken: dict[str, Judgement] = {}
        fences: dict[str, int] = {}
        for row in rows:
            fence = await leases.claim(
                session, Judgement, row.id, owner=owner, seconds=settings.lease_seconds, states=(JudgementState.OPEN,)
            )
            if fence is not None:
                taken[row.id], fences[row.id] = row, fence
        return await _read(session, settings, first.policy_id, taken, fences)


def _due(settings: Settings) -> Any:
    return (
        select(Judgement)
        .join(Policy, Policy.id == Judgement.policy_id)
        .where(
            Judgement.source == LEARNED,
            Judgement.state == JudgementState.OPEN,
            Judgement.due_at <= now(),
            lease_is_free(Judgement),
            Policy.base_model == base_model(settings.model),
        )
        .order_by(Judgement.due_at, Judgement.id)
        .with_for_update(of=Judgement, skip_locked=True)
    )


async def _read(
    session: AsyncSession, settings: Settings, policy_id: str, taken: Mapping[str, Judgement], fences: Mapping[str, int]
) -> Claimed:
    policy = await session.get_one(Policy, policy_id)
    model = await repository.in_state(session, policy_id, RewardModelState.SERVING)
    nobody = await _nobody(session, policy, model, settings)
    turns = {id: row.turn_id for id, row in taken.items()}
    said = await _turns(session, set(turns.values()))
    closed: dict[str, tuple[JudgementState, str]] = {}
    replies: dict[str, Reply] = {}
    for id, turn_id in turns.items():
        why = nobody or _unjudged(said.get(turn_id))
        if why is not None:
            closed[id] = JudgementState.SKIPPED, why
        elif taken[id].attempt >= settings.max_attempts:
            closed[id] = JudgementState.FAILED, f"{LOST}, {settings.max_attempts} times"
        else:
            row = said[turn_id]
            replies[turn_id] = Reply(turn_id, tuple(row.prompt_ids), tuple(row.output_ids))
    return Claimed(policy_id, model, fences, turns, closed, list(replies.values()))


async def _nobody(session: AsyncSession, policy: Policy, model: RewardModel | None, settings: Settings) -> str | None:
    """Why there is nobody to ask."""
    if rewards_of(policy, settings).learned is None:
        return NOT_CONFIGURED
    if model is not None:
        return None
    silenced = await repository.in_state(session, policy.id, RewardModelState.DISABLED)
    if silenced is None:
        return NONE_SERVES
    return f"{SILENCED}: {silenced.reason}" if silenced.reason else SILENCED


async def _turns(session: AsyncSession, turn_ids: set[str]) -> dict[str, Any]:
    consent = func.coalesce(ApiKey.train, Project.train).label("train")
    rows = await session.execute(
        select(
            Turn.id, Turn.prompt_ids, Turn.output_ids, Turn.messages, Turn.exclusion_reason, Turn.deleted_at, consent
        )
        .join(Project, Project.id == Turn.project_id)
        .outerjoin(ApiKey, ApiKey.id == Turn.key_id)
        .where(Turn.id.in_(turn_ids))
    )
    return {row.id: row for row in rows}


def _unjudged(turn: Any) -> str | None:
    if turn is None or turn.deleted_at is not None:
        return DELETED
    if turn.exclusion_reason == NO_CONSENT or not turn.train:
        return NO_CONSENT
    if is_question(turn.messages):
        return OWN_QUESTION
    return None if turn.prompt_ids and turn.output_ids else NO_REPLY


async def settle(
    db: Database, settings: Settings, claimed: Claimed, values: Mapping[str, float], seconds: float, *, why: str = ""
) -> int:
    """Rewards and judgements together, each under its fence; who has lost one lets it be. `values`: by turn. `why`:
    why a reply without a value has none. Returns how many were settled."""
    async with db.write() as session:
        await group_samples.lock(session, set(claimed.turns.values()))
        gone = set(
            await session.scalars(
                select(Turn.id).where(Turn.id.in_(set(claimed.turns.values())), Turn.deleted_at.is_not(None))
            )
        )
        unheard = await _unheard(session, claimed)
        settled: set[str] = set()
        for id in sorted(claimed.turns):
            turn_id = claimed.turns[id]
            value = None if turn_id in gone or unheard else values.get(turn_id)
            state, reason = claimed.closed.get(id, (JudgementState.DONE, None))
            if turn_id in gone:
                state, reason = JudgementState.SKIPPED, DELETED
            elif value is None and reason is None:
                state, reason = JudgementState.SKIPPED, unheard or why
            if await _close(session, claimed, id, state, reason, value, seconds):
                settled.add(turn_id)
        if settled:
            await curate.reconsider(session, settled, settings)
            enqueue_after_commit(session, "assemble")
    return len(settled)


async def _unheard(session: AsyncSession, claimed: Claimed) -> str | None:
    """Silenced while it spoke: its last words are not listened to."""
    if claimed.model is None:
        return None
    state = await session.scalar(select(RewardModel.state).where(RewardModel.id == claimed.model.id))
    return SILENCED if state == RewardModelState.DISABLED else None


async def _close(
    session: AsyncSession,
    claimed: Claimed,
    id: str,
    state: JudgementState,
    reason: str | None,
    value: float | None,
    seconds: float,
) -> bool:
    details: dict[str, Any] = {}
    if value is not None and claimed.model is not None:
        share = seconds / max(1, len(claimed.replies))
        details = {"reward_model": claimed.model.id, "number": claimed.model.number, "seconds": round(share, 4)}
    try:
        await leases.finish(
            session,
            Judgement,
            id,
            fence=claimed.fences[id],
            state=state,
            reason=reason,
            value=value,
            details=details,
            settled_at=now(),
        )
    except leases.LeaseLost:
        return False
    if value is not None:
        await _note(session, claimed.turns[id], value)
    return True


async def _note(session: AsyncSession, turn_id: str, value: float) -> None:
    """Nobody's reliability is measured by it: it has learned from those whom it would vouch for."""
    await session.execute(delete(Reward).where(Reward.turn_id == turn_id, Reward.source == LEARNED))
    session.add(
        Reward(id=new_id("rew"), turn_id=turn_id, source=LEARNED, reward_source=LEARNED, value=value, weight=1.0)
    )
