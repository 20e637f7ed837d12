"""Which reward model speaks for a policy, and every move of it on record.

open ──fitted──▶ serving ──a later one serves──▶ retired
  │                 │ ▲ serve
  │                 ▼ │
  │              silenced: people disagree with it, its files are damaged, or an operator's word
  ├──▶ trained (it was told not to serve)
  ├──▶ refused (not good enough)
  └──▶ failed  (attempt after attempt ended without a result)
"""

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LearnedSource
from app.core.database import now
from app.core.errors import Conflict, NotFound
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Policy, RewardModel, RewardModelState, new_id, record_audit
from app.training.policy_rewards import rewards_of
from app.training.reward_models import repository

MAY_SERVE = (RewardModelState.TRAINED, RewardModelState.DISABLED, RewardModelState.RETIRED)
TRAINER, SWEEP, ERASURE = "trainer", "reconcile", "erasure"
STATIONS = (TRAINER, SWEEP, ERASURE)  # what they silence is fitted anew; an operator's word holds


def label(policy: Policy, row: RewardModel) -> str:
    """Example: "assistant/rm-3"."""
    return f"{policy.name}/rm-{row.number}"


def source_of(policy: Policy, settings: Settings) -> LearnedSource:
    """Raises Conflict for a policy that listens to no reward model."""
    source = rewards_of(policy, settings).learned
    if source is None:
        raise Conflict(
            f"'{policy.name}' listens to no reward model: give its rewards a source of the type 'learned'.",
            code="no_learned_source",
        )
    return source


async def found(session: AsyncSession, policy: Policy, number: int) -> RewardModel:
    row = await repository.numbered(session, policy.id, number)
    if row is None:
        raise NotFound(f"Policy '{policy.name}' has no reward model {number}.", param="number")
    return row


async def open_fit(
    session: AsyncSession, policy: Policy, *, actor: str, reason: str | None, serves: bool = True
) -> RewardModel:
    """A row to be fitted. The caller holds the policy's lock. Raises Conflict while one is under way."""
    under_way = await repository.in_state(session, policy.id, RewardModelState.OPEN)
    if under_way is not None:
        raise Conflict(f"{label(policy, under_way)} is being fitted.", code="fit_under_way")
    last = await repository.newest(session, policy.id)
    row = RewardModel(
        id=new_id("rwm"),
        policy_id=policy.id,
        number=(last.number if last else 0) + 1,
        state=RewardModelState.OPEN,
        actor=actor,
        reason=reason,
        serve_when_fitted=serves,
        metrics={},
    )
    session.add(row)
    await session.flush()
    record_audit(session, actor, "fit reward model", label(policy, row), reason, project_id=policy.project_id)
    enqueue_after_commit(session, "train")
    return row


async def serve(session: AsyncSession, policy: Policy, row: RewardModel, *, actor: str, reason: str | None) -> None:
    """It speaks from now on, and the one that did is retired. Idempotent. Raises Conflict for what may not."""
    if row.state == RewardModelState.SERVING:
        return
    if row.tainted_at is not None:
        raise Conflict(f"{label(policy, row)} has learned from what is erased.", code="reward_model_erased")
    if row.state not in MAY_SERVE or row.path is None:
        raise Conflict(f"{label(policy, row)} is {row.state}: it cannot serve.", code="reward_model_state")
    await take_over(session, policy)
    await _move(session, policy, row, RewardModelState.SERVING, actor, reason)
    row.served_at = now()
    enqueue_after_commit(session, "train")


async def take_over(session: AsyncSession, policy: Policy) -> None:
    """Whichever serves is retired, before another may."""
    await session.execute(
        update(RewardModel)
        .where(RewardModel.policy_id == policy.id, RewardModel.state == RewardModelState.SERVING)
        .values(state=RewardModelState.RETIRED, reason="a later one serves")
        .execution_options(synchronize_session="fetch")
    )


async def disable(session: AsyncSession, policy: Policy, row: RewardModel, *, actor: str, reason: str | None) -> None:
    """Its word is not asked for any more; where an operator says so, a fit that is under way will not speak in its
    place. Idempotent. Raises Conflict for one that does not serve."""
    if row.state == RewardModelState.DISABLED:
        return
    if row.state != RewardModelState.SERVING:
        raise Conflict(f"{label(policy, row)} is {row.state}: it does not serve.", code="reward_model_state")
    await _move(session, policy, row, RewardModelState.DISABLED, actor, reason)
    if actor not in STATIONS:
        await session.execute(
            update(RewardModel)
            .where(RewardModel.policy_id == policy.id, RewardModel.state == RewardModelState.OPEN)
            .values(serve_when_fitted=False)
            .execution_options(synchronize_session=False)
        )


async def _move(
    session: AsyncSession, policy: Policy, row: RewardModel, state: RewardModelState, actor: str, reason: str | None
) -> None:
    row.state, row.actor, row.reason = state, actor, reason
    await session.flush()
    record_audit(session, actor, f"reward model {state}", label(policy, row), reason, project_id=policy.project_id)
