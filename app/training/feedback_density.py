"""Whether few of a policy's replies get feedback from people (ATTUNE_FEEDBACK), and what its rewards have then.

Where feedback is sparse, a reward model that is fitted on it scores the other replies; where it is dense, votes alone
teach more. The share is measured by the reconciler on the newest replies that are old enough to have got a vote.
"""

from sqlalchemy import bindparam, case, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import EXPLICIT, SPARSE_REWARD_MODEL, RewardsConfig
from app.core.database import Database, now
from app.core.run_each import run_each
from app.core.settings import Settings
from app.models import AuditAction, Origin, Policy, Reward, Turn, TurnState
from app.policies.locks import lock_policy
from app.policies.service import audit_policy
from app.training.automated_samples import is_from_person

MAX_REPLIES, MIN_REPLIES = 500, 200  # that the share is measured on
MIN_AGE_SECONDS = 300.0  # of a reply, since feedback comes later than the reply
MAX_AGE_SECONDS = 7 * 86400.0  # of the replies that the share is measured on
MEASURE_SECONDS = 60.0
VOTE_WINDOW_SECONDS = 60.0  # a reply waits so long for a vote before its score alone is learned from
SPARSE_BELOW, DENSE_ABOVE = 0.15, 0.3  # in between, what was measured before holds


def is_sparse(policy: Policy, settings: Settings) -> bool:
    """Return whether the recipe for sparse feedback applies to the policy."""
    return policy.sparse_feedback if settings.feedback == "auto" else settings.feedback == "sparse"


def add_reward_model(config: RewardsConfig) -> RewardsConfig:
    """Return the rewards with a reward model; as they are if they have one, or do not use people's feedback."""
    explicit = config.source(EXPLICIT)
    if config.reward_model is not None or explicit is None:
        return config
    patient = explicit.model_copy(update={"window_seconds": max(explicit.window_seconds, VOTE_WINDOW_SECONDS)})
    sources = [patient if source is explicit else source for source in config.sources]
    return config.model_copy(update={"sources": (*sources, SPARSE_REWARD_MODEL)})


async def measure_feedback(db: Database, settings: Settings) -> None:
    """Measure the share of replies with feedback, at most every MEASURE_SECONDS, and say if it is sparse."""
    is_due = func.coalesce(Policy.feedback_measured_at, 0.0) < now() - MEASURE_SECONDS
    async with db.read() as session:
        policies = list(await session.scalars(select(Policy).where(is_due).order_by(Policy.id)))

    async def measure_policy(policy: Policy) -> None:
        async with db.write() as session:  # first, so that a policy whose measurement fails is not tried all the time
            is_policy = Policy.id == policy.id
            await session.execute(update(Policy).where(is_policy).values(feedback_measured_at=now()))
        async with db.read() as session:
            share = await _measure_share(session, policy)
        async with db.write() as session:
            await _record_share(session, policy.id, share, settings)

    await run_each(policies, measure_policy, "the share of feedback of")


async def _measure_share(session: AsyncSession, policy: Policy) -> float | None:
    """Return the share of the newest replies that a person gave feedback on; None with too few replies."""
    replies = (
        select(Turn.id)
        .where(
            Turn.policy_id == policy.id,
            Turn.origin == bindparam(None, Origin.CHAT.value, literal_execute=True),  # for the partial index
            Turn.state == TurnState.DONE,
            Turn.exclusion_reason.is_(None),
            Turn.created_at.between(now() - MAX_AGE_SECONDS, now() - MIN_AGE_SECONDS),
        )
        .order_by(Turn.created_at.desc())
        .limit(MAX_REPLIES)
        .subquery()
    )
    has_feedback = exists().where(Reward.turn_id == replies.c.id, is_from_person())
    query = select(func.count(), func.count(case((has_feedback, 1)))).select_from(replies)
    num_replies, num_rated = (await session.execute(query)).one()
    return num_rated / num_replies if num_replies >= MIN_REPLIES else None


async def _record_share(session: AsyncSession, policy_id: str, share: float | None, settings: Settings) -> None:
    await session.execute(update(Policy).where(Policy.id == policy_id).values(feedback_share=share))
    if share is None or SPARSE_BELOW <= share <= DENSE_ABOVE:
        return
    policy = (await lock_policy(session, policy_id)).policy
    becomes_sparse = share < SPARSE_BELOW
    if policy.sparse_feedback == becomes_sparse:
        return
    policy.sparse_feedback = becomes_sparse
    if settings.feedback == "auto":
        action = AuditAction.FEEDBACK_SPARSE if becomes_sparse else AuditAction.FEEDBACK_DENSE
        audit_policy(session, policy, action, "reconcile", f"people gave feedback on {share:.1%} of the newest replies")
