"""Judgements → rewards by the policy's own reward model: many turns in one forward pass, run by the trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED
from alignment.reward_model.dataset import Reply
from alignment.signals.judge_prompts import is_judge_prompt
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
from app.projects.bootstrap import resolve_base_model
from app.projects.consent import NO_CONSENT
from app.training.reward_config import effective_rewards
from app.training.reward_models import repository
from workers.feedback import group_samples, rewards
from workers.judging.request import DELETED, JUDGE_PROMPT, NO_REPLY, NOT_CONFIGURED
from workers.queue.leased_job import Lease, claim_row

MAX_TURNS = 64  # of one forward pass
NOT_SERVING = "no reward model serves"
DISABLED = "the reward model is disabled"
TRAINER_LOST = "the trainer stopped before it scored the reply"


@dataclass(frozen=True)
class ScoringJob:
    """Claimed judgements of one policy, and the reward model that scores their turns.

    `leases` and `turn_ids` are by judgement, and so is `closed`: the state and the reason of judgements that get no
    score.
    """

    policy_id: str
    model: RewardModel | None
    leases: Mapping[str, Lease]
    turn_ids: Mapping[str, str]
    closed: Mapping[str, tuple[JudgementState, str]]
    replies: Sequence[Reply]

    @property
    def fences(self) -> dict[str, int]:
        return {id: lease.fence for id, lease in self.leases.items()}


async def claim_scoring_job(db: Database, owner: str, settings: Settings) -> ScoringJob | None:
    """Claim the judgement that has been due longest, and others of the same policy. Returns None if none is due.

    A judgement whose earlier attempt ended without a result is claimed alone: a reply that crashes the trainer must not
    take others with it.
    """
    async with db.write() as session:
        first = await session.scalar(_select_due(settings).limit(1))
        if first is None:
            return None
        rows = [first]
        if first.attempt == 0:
            first_attempts = _select_due(settings).where(Judgement.policy_id == first.policy_id, Judgement.attempt == 0)
            rows = list(await session.scalars(first_attempts.limit(MAX_TURNS)))
        claimed: dict[str, Lease] = {}
        turn_ids: dict[str, str] = {}
        for row in rows:
            lease = await claim_row(session, Judgement, row, owner=owner, settings=settings)
            if lease is not None:
                claimed[row.id], turn_ids[row.id] = lease, row.turn_id
        return await _read_job(session, settings, first.policy_id, claimed, turn_ids)


def _select_due(settings: Settings) -> Any:
    return (
        select(Judgement)
        .join(Policy, Policy.id == Judgement.policy_id)
        .where(
            Judgement.source == LEARNED,
            Judgement.state == JudgementState.OPEN,
            Judgement.due_at <= now(),
            lease_is_free(Judgement),
            Policy.base_model == resolve_base_model(settings.model),
        )
        .order_by(Judgement.due_at, Judgement.id)
        .with_for_update(of=Judgement, skip_locked=True)
    )


async def _read_job(
    session: AsyncSession,
    settings: Settings,
    policy_id: str,
    claimed: Mapping[str, Lease],
    turn_ids: Mapping[str, str],
) -> ScoringJob:
    policy = await session.get_one(Policy, policy_id)
    model = await repository.find_in_state(session, policy_id, RewardModelState.SERVING)
    no_model_reason = await _find_no_model_reason(session, policy, model, settings)
    turns = await _read_turns(session, set(turn_ids.values()))
    closed: dict[str, tuple[JudgementState, str]] = {}
    replies: dict[str, Reply] = {}
    for id, turn_id in turn_ids.items():
        reason = no_model_reason or _find_skip_reason(turns.get(turn_id))
        if reason is not None:
            closed[id] = JudgementState.SKIPPED, reason
        elif claimed[id].attempt > settings.max_attempts:
            closed[id] = JudgementState.FAILED, f"{TRAINER_LOST}, {settings.max_attempts} times"
        else:
            turn = turns[turn_id]
            replies[turn_id] = Reply(turn_id, tuple(turn.prompt_ids), tuple(turn.output_ids))
    return ScoringJob(policy_id, model, claimed, turn_ids, closed, list(replies.values()))


async def _find_no_model_reason(
    session: AsyncSession, policy: Policy, model: RewardModel | None, settings: Settings
) -> str | None:
    """Return why no reward model can score the policy's turns, None if one can."""
    if effective_rewards(policy, settings).learned is None:
        return NOT_CONFIGURED
    if model is not None:
        return None
    disabled = await repository.find_in_state(session, policy.id, RewardModelState.DISABLED)
    if disabled is None:
        return NOT_SERVING
    return f"{DISABLED}: {disabled.reason}" if disabled.reason else DISABLED


async def _read_turns(session: AsyncSession, turn_ids: set[str]) -> dict[str, Any]:
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


def _find_skip_reason(turn: Any) -> str | None:
    """Return why the turn must not be scored, None if it may be."""
    if turn is None or turn.deleted_at is not None:
        return DELETED
    if turn.exclusion_reason == NO_CONSENT or not turn.train:
        return NO_CONSENT
    if is_judge_prompt(turn.messages):
        return JUDGE_PROMPT
    return None if turn.prompt_ids and turn.output_ids else NO_REPLY


async def record_scores(
    db: Database, settings: Settings, job: ScoringJob, scores: Mapping[str, float], seconds: float, *, reason: str = ""
) -> int:
    """Write judgements and rewards in one transaction, each under its fence; a lost lease is left out.

    `scores` is by turn, `reason` says why a reply has no score, `seconds` is the duration of the forward pass. Returns
    the number of turns whose judgements reached a final state.
    """
    async with db.write() as session:
        turn_ids = set(job.turn_ids.values())
        await group_samples.lock_groups(session, turn_ids)
        deleted = set(await session.scalars(select(Turn.id).where(Turn.id.in_(turn_ids), Turn.deleted_at.is_not(None))))
        disabled_reason = await _find_disabled_reason(session, job)
        finished: set[str] = set()
        for id in sorted(job.turn_ids):
            turn_id = job.turn_ids[id]
            score = None if turn_id in deleted or disabled_reason else scores.get(turn_id)
            state, why = job.closed.get(id, (JudgementState.DONE, None))
            if turn_id in deleted:
                state, why = JudgementState.SKIPPED, DELETED
            elif score is None and why is None:
                state, why = JudgementState.SKIPPED, disabled_reason or reason
            if await _finish(session, job, id, state, why, score, seconds):
                finished.add(turn_id)
        if finished:
            await rewards.update_turn_samples(session, finished, settings)
            enqueue_after_commit(session, "assemble")
    return len(finished)


async def _find_disabled_reason(session: AsyncSession, job: ScoringJob) -> str | None:
    """Return a reason if the model was disabled while it scored: its scores must not be used."""
    if job.model is None:
        return None
    state = await session.scalar(select(RewardModel.state).where(RewardModel.id == job.model.id))
    return DISABLED if state == RewardModelState.DISABLED else None


async def _finish(
    session: AsyncSession,
    job: ScoringJob,
    id: str,
    state: JudgementState,
    reason: str | None,
    score: float | None,
    seconds: float,
) -> bool:
    """Write one judgement and its reward. Returns False if the lease was lost."""
    details: dict[str, Any] = {}
    if score is not None and job.model is not None:
        seconds_per_reply = seconds / max(1, len(job.replies))
        details = {"reward_model": job.model.id, "number": job.model.number, "seconds": round(seconds_per_reply, 4)}
    try:
        await leases.finish(
            session,
            Judgement,
            id,
            fence=job.leases[id].fence,
            state=state,
            reason=reason,
            value=score,
            details=details,
            settled_at=now(),
        )
    except leases.LeaseLost:
        return False
    if score is not None:
        await _replace_reward(session, job.turn_ids[id], score)
    return True


async def _replace_reward(session: AsyncSession, turn_id: str, score: float) -> None:
    """Store the reward. It does not count as agreement with raters, since the model learned from those raters."""
    await session.execute(delete(Reward).where(Reward.turn_id == turn_id, Reward.source == LEARNED))
    session.add(
        Reward(id=new_id("rew"), turn_id=turn_id, source=LEARNED, reward_source=LEARNED, value=score, weight=1.0)
    )
