"""The life of a reward model, and which one serves. Every change of state is audited.

open ──fitted──▶ serving ──a later one serves──▶ retired
  │                 │ ▲ serve
  │                 ▼ │
  │              disabled (people disagree with it, its files are damaged, or an operator disabled it)
  ├──▶ trained (fitted with `serve` false)
  ├──▶ refused (not good enough)
  └──▶ failed  (no attempt has produced a result)
"""

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LearnedSource
from app.core.database import now
from app.core.errors import Conflict, NotFound
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import AuditAction, Policy, RewardModel, RewardModelState, new_id, record_audit
from app.training.reward_config import effective_rewards
from app.training.reward_models import repository
from app.training.reward_models.repository import reward_model_name

MAY_SERVE = (RewardModelState.TRAINED, RewardModelState.DISABLED, RewardModelState.RETIRED)
TRAINER, RECONCILER, ERASURE = "trainer", "reconcile", "erasure"
AUTOMATIC_ACTORS = (TRAINER, RECONCILER, ERASURE)  # after one of them disables a model, the next fit may still serve


def get_learned_source(policy: Policy, settings: Settings) -> LearnedSource:
    """Return the policy's reward source of the type "learned". Raises Conflict without one."""
    source = effective_rewards(policy, settings).learned
    if source is None:
        raise Conflict(
            f"'{policy.name}' uses no reward model: give its rewards a source of the type 'learned'.",
            code="no_learned_source",
        )
    return source


async def get_reward_model(session: AsyncSession, policy: Policy, number: int) -> RewardModel:
    """Return the reward model. Raises NotFound."""
    row = await repository.find_reward_model(session, policy.id, number)
    if row is None:
        raise NotFound(f"Policy '{policy.name}' has no reward model {number}.", param="number")
    return row


async def create_fit(
    session: AsyncSession, policy: Policy, *, actor: str, reason: str | None, serve_when_fitted: bool = True
) -> RewardModel:
    """Create a reward model to be fitted. The caller holds the policy's lock.

    Raises Conflict while another fit is open.
    """
    open_fit = await repository.find_in_state(session, policy.id, RewardModelState.OPEN)
    if open_fit is not None:
        raise Conflict(f"{reward_model_name(policy, open_fit)} is being fitted.", code="fit_under_way")
    newest = await repository.find_newest(session, policy.id)
    row = RewardModel(
        id=new_id("rwm"),
        policy_id=policy.id,
        number=(newest.number if newest else 0) + 1,
        state=RewardModelState.OPEN,
        actor=actor,
        reason=reason,
        serve_when_fitted=serve_when_fitted,
        metrics={},
    )
    session.add(row)
    await session.flush()
    record_audit(
        session,
        actor,
        AuditAction.REWARD_MODEL_FIT_REQUESTED,
        reward_model_name(policy, row),
        reason,
        project_id=policy.project_id,
    )
    enqueue_after_commit(session, "train")
    return row


async def serve(session: AsyncSession, policy: Policy, row: RewardModel, *, actor: str, reason: str | None) -> None:
    """Let the reward model serve, and retire the one that did. Idempotent. Raises Conflict if it cannot serve."""
    if row.state == RewardModelState.SERVING:
        return
    name = reward_model_name(policy, row)
    if row.tainted_at is not None:
        raise Conflict(f"{name} has learned from erased data.", code="reward_model_tainted")
    if row.state not in MAY_SERVE or row.path is None:
        raise Conflict(f"{name} is {row.state}: it cannot serve.", code="reward_model_state")
    await retire_serving(session, policy)
    await _set_state(session, policy, row, RewardModelState.SERVING, actor, reason)
    row.served_at = now()
    enqueue_after_commit(session, "train")


async def retire_serving(session: AsyncSession, policy: Policy) -> None:
    """Retire the reward model that serves; another can serve only after that."""
    await session.execute(
        update(RewardModel)
        .where(RewardModel.policy_id == policy.id, RewardModel.state == RewardModelState.SERVING)
        .values(state=RewardModelState.RETIRED, reason="a later one serves")
        .execution_options(synchronize_session="fetch")
    )


async def disable(session: AsyncSession, policy: Policy, row: RewardModel, *, actor: str, reason: str | None) -> None:
    """Stop using the reward model. Idempotent. Raises Conflict if it does not serve.

    If an operator disables it, an open fit will not serve in its place.
    """
    if row.state == RewardModelState.DISABLED:
        return
    if row.state != RewardModelState.SERVING:
        name = reward_model_name(policy, row)
        raise Conflict(f"{name} is {row.state}: it does not serve.", code="reward_model_state")
    await _set_state(session, policy, row, RewardModelState.DISABLED, actor, reason)
    if actor not in AUTOMATIC_ACTORS:
        await session.execute(
            update(RewardModel)
            .where(RewardModel.policy_id == policy.id, RewardModel.state == RewardModelState.OPEN)
            .values(serve_when_fitted=False)
            .execution_options(synchronize_session=False)
        )


async def _set_state(
    session: AsyncSession, policy: Policy, row: RewardModel, state: RewardModelState, actor: str, reason: str | None
) -> None:
    row.state, row.actor, row.reason = state, actor, reason
    await session.flush()
    record_audit(
        session,
        actor,
        AuditAction(f"reward_model.{state}"),
        reward_model_name(policy, row),
        reason,
        project_id=policy.project_id,
    )
