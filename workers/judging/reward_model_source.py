"""Judgements → rewards by the policy's own reward model: many turns in one forward pass, run by the trainer."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED
from alignment.reward_model.dataset import Reply
from app.chat.histories import read_prompt_ids
from app.core.database import Database
from app.core.leases import LeaseLost
from app.core.settings import Settings
from app.models import Judgement, JudgementState, Policy, RewardModel, RewardModelState, Turn
from app.models.reward import JudgementDetails
from app.projects.service import resolve_base_model
from app.training import reward_models
from app.training.policy_config import effective_rewards
from workers.feedback import rewards, sample_groups
from workers.judging.request import DELETED, NO_REPLY, NOT_CONFIGURED, check_turn
from workers.queue.leased_job import JobEnded, JobFailed, JobSkipped, claim_row, finish_row, is_due

MAX_TURNS = 64  # of one forward pass
NOT_SERVING = "no reward model serves"
DISABLED = "the reward model is disabled"
TRAINER_LOST = "the trainer stopped before it scored the reply"


@dataclass(frozen=True)
class ScoringJob:
    """Claimed judgements of one policy, and the reward model that scores their turns.

    `closed` holds, by judgement, why it gets no score; `replies` are those of the other judgements.
    """

    policy_id: str
    reward_model: RewardModel | None
    judgements: tuple[Judgement, ...]
    closed: Mapping[str, JobEnded]
    replies: tuple[Reply, ...]


async def claim_scoring_job(db: Database, owner: str, settings: Settings) -> ScoringJob | None:
    """Claim the judgement that has been due longest, and others of the same policy. Returns None if none is due.

    A judgement whose earlier attempt ended without a result is claimed alone: a reply that crashes the trainer must not
    take others with it.
    """
    due = (
        select(Judgement)
        .join(Policy, Policy.id == Judgement.policy_id)
        .where(is_due(Judgement), Judgement.source == LEARNED, Policy.base_model == resolve_base_model(settings.model))
        .order_by(Judgement.due_at, Judgement.id)
        .with_for_update(of=Judgement, skip_locked=True)
    )
    async with db.write() as session:
        first = await session.scalar(due.limit(1))
        if first is None:
            return None
        rows = [first]
        if first.attempt == 0:
            first_attempts = due.where(Judgement.policy_id == first.policy_id, Judgement.attempt == 0)
            rows = list(await session.scalars(first_attempts.limit(MAX_TURNS)))
        judgements = [row for row in rows if await claim_row(session, row, owner, settings)]
        return await _read_job(session, settings, first.policy_id, tuple(judgements))


async def _read_job(
    session: AsyncSession, settings: Settings, policy_id: str, judgements: tuple[Judgement, ...]
) -> ScoringJob:
    policy = await session.get_one(Policy, policy_id)
    reward_model = await reward_models.find_newest(session, policy_id, RewardModelState.SERVING)
    no_model_reason = await _find_no_model_reason(session, policy, reward_model, settings)
    turn_ids = {judgement.turn_id for judgement in judgements}
    turns = {turn.id: turn for turn in await session.scalars(select(Turn).where(Turn.id.in_(turn_ids)))}
    prompt_ids = await read_prompt_ids(session, turn_ids)
    closed: dict[str, JobEnded] = {}
    replies: list[Reply] = []
    for judgement in judgements:
        try:
            if no_model_reason is not None:
                raise JobSkipped(no_model_reason)
            turn = await check_turn(session, turns.get(judgement.turn_id))
            if turn.id not in prompt_ids or not turn.output_ids:
                raise JobSkipped(NO_REPLY)
            if judgement.attempt > settings.workers.max_attempts:
                raise JobFailed(f"{TRAINER_LOST}, {settings.workers.max_attempts} times")
            replies.append(Reply(turn.id, tuple(prompt_ids[turn.id]), tuple(turn.output_ids)))
        except JobEnded as end:
            closed[judgement.id] = end
    return ScoringJob(policy_id, reward_model, judgements, closed, tuple(replies))


async def _find_no_model_reason(
    session: AsyncSession, policy: Policy, reward_model: RewardModel | None, settings: Settings
) -> str | None:
    """Return why no reward model can score the policy's turns, None if one can."""
    if effective_rewards(policy, settings).reward_model is None:
        return NOT_CONFIGURED
    if reward_model is not None:
        return None
    disabled = await reward_models.find_newest(session, policy.id, RewardModelState.DISABLED)
    if disabled is None:
        return NOT_SERVING
    return f"{DISABLED}: {disabled.reason}" if disabled.reason else DISABLED


async def record_scores(
    db: Database, settings: Settings, job: ScoringJob, scores: Mapping[str, float], seconds: float, *, reason: str = ""
) -> int:
    """Write judgements and rewards in one transaction, each under its fence; a lost lease is left out.

    The reward is the score, with a weight from the model's agreement with people. `scores` is by turn, `reason` says
    why a reply has no score, `seconds` is the duration of the forward pass. Returns the number of turns whose
    judgements reached a final state.
    """
    weight = 1.0
    turn_ids = {judgement.turn_id for judgement in job.judgements}
    details: JudgementDetails = {"seconds": round(seconds / max(1, len(job.replies)), 4)}
    if job.reward_model is not None:
        weight = reward_models.score_weight(job.reward_model)
        details["reward_model"] = job.reward_model.id
        details["number"] = job.reward_model.number
        details["weight"] = round(weight, 3)
    finished: set[str] = set()
    async with db.write() as session:
        deleted = await sample_groups.lock_and_find_deleted(session, turn_ids)
        if await _was_disabled(session, job):
            scores, reason = {}, DISABLED
        for judgement in sorted(job.judgements, key=lambda row: row.id):
            turn_id, end = judgement.turn_id, job.closed.get(judgement.id)
            if turn_id in deleted:
                end = JobSkipped(DELETED)
            elif end is None and turn_id not in scores:
                end = JobSkipped(reason)
            with suppress(LeaseLost):
                if end is not None:
                    await finish_row(session, judgement, end.state, str(end))
                else:
                    score = scores[turn_id]
                    await finish_row(session, judgement, JudgementState.DONE, value=score, details=details)
                    await rewards.record_reward(session, turn_id, LEARNED, score, weight=weight)
                finished.add(turn_id)
        if finished:
            await rewards.update_turn_samples(session, finished, settings)
    return len(finished)


async def _was_disabled(session: AsyncSession, job: ScoringJob) -> bool:
    """Return whether the model was disabled while it scored: its scores must not be used."""
    if job.reward_model is None:
        return False
    state = await session.scalar(select(RewardModel.state).where(RewardModel.id == job.reward_model.id))
    return state == RewardModelState.DISABLED
