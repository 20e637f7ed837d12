"""Reward models of a policy: their fits, and which one serves. Every change of state is audited.

open ──fitted──▶ serving ──a later one serves──▶ retired
  │                 │ ▲ serve
  │                 ▼ │
  │              disabled (people disagree with it, its files are damaged, or an operator disabled it)
  ├──▶ trained (fitted with `serve` false)
  ├──▶ refused (not good enough)
  └──▶ failed  (no attempt has produced a result)
"""

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.signals.agreement import weight_from_agreement
from app.core.database import now
from app.core.errors import Conflict, require_row
from app.core.jobs import enqueue_after_commit
from app.models import TRAINER, AuditAction, Policy, RewardModel, RewardModelState, RewardModelTurn, new_id
from app.policies.locks import LockedPolicy
from app.policies.service import audit_policy

SERVING_AUC_LOW = "serving_auc_low"  # of RewardModel.metrics: the lower bound by people's feedback since it serves
MAY_SERVE = (RewardModelState.TRAINED, RewardModelState.DISABLED, RewardModelState.RETIRED)
RECONCILER, ERASURE = "reconcile", "erasure"
AUTOMATIC_ACTORS = (TRAINER, RECONCILER, ERASURE)  # after one of them disables a model, the next fit may still serve


def reward_model_name(policy: Policy, row: RewardModel) -> str:
    """Example: "assistant/rm-3"."""
    return format_name(policy.name, row.number)


def format_name(policy: str, number: int) -> str:
    """Example: ("assistant", 3) -> "assistant/rm-3"."""
    return f"{policy}/rm-{number}"


async def list_reward_models(session: AsyncSession, policy_id: str) -> list[RewardModel]:
    """Return the policy's reward models, the newest first."""
    query = select(RewardModel).where(RewardModel.policy_id == policy_id).order_by(RewardModel.number.desc())
    return list(await session.scalars(query))


async def get_reward_model(session: AsyncSession, policy: Policy, number: int) -> RewardModel:
    """Return the reward model. Raises NotFound."""
    query = select(RewardModel).where(RewardModel.policy_id == policy.id, RewardModel.number == number)
    message = f"Policy '{policy.name}' has no reward model {number}."
    return require_row(await session.scalar(query), message, param="number")


async def find_newest(
    session: AsyncSession, policy_id: str, state: RewardModelState | None = None
) -> RewardModel | None:
    """Return the newest reward model, or the newest one in this state."""
    query = select(RewardModel).where(RewardModel.policy_id == policy_id)
    if state is not None:
        query = query.where(RewardModel.state == state)
    return await session.scalar(query.order_by(RewardModel.number.desc()).limit(1))


def score_weight(row: RewardModel) -> float:
    """Return the factor of the model's scores, from the lower bound of how well it orders replies: by people's feedback
    since it serves, or, while there is too little of it, by the votes that were predicted until its fit."""
    low = row.metrics.get(SERVING_AUC_LOW, row.metrics.get("auc_low", row.metrics.get("agreement")))
    return 1.0 if low is None else weight_from_agreement(low)


async def lock_fitted_on(session: AsyncSession, turn_ids: Collection[str]) -> list[RewardModel]:
    """Lock and return the reward models that read feedback on one of these turns."""
    fitted = select(RewardModelTurn.reward_model_id).where(RewardModelTurn.turn_id.in_(turn_ids))
    query = select(RewardModel).where(RewardModel.id.in_(fitted)).order_by(RewardModel.policy_id, RewardModel.number)
    return list(await session.scalars(query.with_for_update()))


async def names_fitted_on(session: AsyncSession, turns: Mapping[str, float]) -> list[str]:
    """Return the names of the reward models that were fitted on feedback on these turns.

    Args:
        turns: For each turn id, when the feedback on it was given. A model that read its data before is left out.
    """
    rows = await session.execute(
        select(Policy.name, RewardModel.number, RewardModel.data_read_at, RewardModelTurn.turn_id)
        .join(RewardModel, RewardModel.policy_id == Policy.id)
        .join(RewardModelTurn, RewardModelTurn.reward_model_id == RewardModel.id)
        .where(RewardModelTurn.turn_id.in_(turns), RewardModel.path.is_not(None))
    )
    fitted = {
        (policy, number) for policy, number, data_read_at, turn_id in rows if turns[turn_id] <= (data_read_at or 0.0)
    }
    return [format_name(policy, number) for policy, number in sorted(fitted)]


async def summarize(session: AsyncSession, policies: Sequence[Policy]) -> list[dict[str, str | None]]:
    """Return, for each policy with a reward model, the one that serves and the newest one with its state."""
    rows: list[dict[str, str | None]] = []
    for policy in policies:
        newest = await find_newest(session, policy.id)
        if newest is not None:
            serving = await find_newest(session, policy.id, RewardModelState.SERVING)
            rows.append(
                {
                    "serving": reward_model_name(policy, serving) if serving else None,
                    "newest": reward_model_name(policy, newest),
                    "state": newest.state,
                    "reason": newest.reason,
                }
            )
    return rows


async def create_fit(
    locked: LockedPolicy, *, actor: str, reason: str | None, serve_when_fitted: bool = True
) -> RewardModel:
    """Create a reward model to be fitted. Raises Conflict while another fit is open."""
    session, policy = locked
    open_fit = await find_newest(session, policy.id, RewardModelState.OPEN)
    if open_fit is not None:
        raise Conflict(f"{reward_model_name(policy, open_fit)} is being fitted.", code="fit_under_way")
    newest = await find_newest(session, policy.id)
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
    name = reward_model_name(policy, row)
    audit_policy(session, policy, AuditAction.REWARD_MODEL_FIT_REQUESTED, actor, reason, subject=name)
    enqueue_after_commit(session, "train")
    return row


async def serve(locked: LockedPolicy, row: RewardModel, *, actor: str, reason: str | None) -> None:
    """Let the reward model serve, and retire the one that did. Idempotent. Raises Conflict if it cannot serve."""
    session, policy = locked
    if row.state == RewardModelState.SERVING:
        return
    name = reward_model_name(policy, row)
    if row.tainted_at is not None:
        raise Conflict(f"{name} has learned from erased data.", code="reward_model_tainted")
    if row.state not in MAY_SERVE or row.path is None:
        raise Conflict(f"{name} is {row.state}: it cannot serve.", code="reward_model_state")
    await retire_serving(locked)
    await _set_state(locked, row, RewardModelState.SERVING, actor, reason)
    row.served_at = now()
    enqueue_after_commit(session, "train")


async def retire_serving(locked: LockedPolicy) -> None:
    """Retire the reward model that serves; another can serve only after that."""
    await locked.session.execute(
        update(RewardModel)
        .where(RewardModel.policy_id == locked.policy.id, RewardModel.state == RewardModelState.SERVING)
        .values(state=RewardModelState.RETIRED, reason="a later one serves")
        .execution_options(synchronize_session="fetch")
    )


async def disable(locked: LockedPolicy, row: RewardModel, *, actor: str, reason: str | None) -> None:
    """Stop using the reward model. Idempotent. Raises Conflict if it does not serve.

    If an operator disables it, an open fit will not serve in its place.
    """
    session, policy = locked
    if row.state == RewardModelState.DISABLED:
        return
    if row.state != RewardModelState.SERVING:
        name = reward_model_name(policy, row)
        raise Conflict(f"{name} is {row.state}: it does not serve.", code="reward_model_state")
    await _set_state(locked, row, RewardModelState.DISABLED, actor, reason)
    if actor not in AUTOMATIC_ACTORS:
        open_fits = (RewardModel.policy_id == policy.id, RewardModel.state == RewardModelState.OPEN)
        await session.execute(update(RewardModel).where(*open_fits).values(serve_when_fitted=False))


async def _set_state(
    locked: LockedPolicy, row: RewardModel, state: RewardModelState, actor: str, reason: str | None
) -> None:
    session, policy = locked
    row.state, row.actor, row.reason = state, actor, reason
    await session.flush()
    name = reward_model_name(policy, row)
    audit_policy(session, policy, AuditAction(f"reward_model.{state}"), actor, reason, subject=name)
