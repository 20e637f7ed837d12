"""The states of a policy: what an admin may do, and what follows for its traffic, its training and its versions.

    active ──pause──▶ paused ──archive──▶ archived ──delete──▶ deleted
      ▲ └──────────archive──────────────────▲ │
      └── resume ──┘    └──── unarchive ──────┘

A paused policy answers chats and is not trained: an update under way is finished. An archived one answers none, and the
engines unload its versions; all is kept, and it can be brought back. A deleted one cannot: the reconciler drops its
waiting samples and deletes the files of its versions. Its row remains, because turns refer to it: what they hold goes
when the project's retention says so.
"""

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.errors import Conflict
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.deployments import service, traffic
from app.models import (
    ANSWERING,
    AuditAction,
    Batch,
    BatchState,
    Pin,
    PlanState,
    Policy,
    PolicyState,
    RewardModel,
    RewardModelState,
    RolloutPlan,
)
from app.policies import repository
from app.policies.locks import LockedPolicy
from app.policies.service import Attribution, audit_policy
from app.training import batch_samples

POLICY_DELETED = "its policy was deleted"
POLICY_ARCHIVED = "its policy was archived"
NAME_LENGTH = 50  # of a deleted policy's name that is kept


async def pause(locked: LockedPolicy, by: Attribution) -> None:
    """Stop training; chats are still answered. Idempotent. Raises Conflict for an archived policy."""
    if locked.policy.state == PolicyState.ARCHIVED:
        raise _is_archived(locked.policy)
    await _set_state(locked, PolicyState.PAUSED, by)


async def resume(locked: LockedPolicy, by: Attribution) -> None:
    """Continue training. Idempotent. Raises Conflict for an archived policy."""
    session, policy = locked
    if policy.state == PolicyState.ARCHIVED:
        raise _is_archived(policy)
    await _set_state(locked, PolicyState.ACTIVE, by)
    enqueue_after_commit(session, "assemble", "train", "rollout")


async def archive(locked: LockedPolicy, by: Attribution, settings: Settings) -> None:
    """Answer no chats any more, and keep everything. Idempotent. Raises Conflict for a policy that others need.

    A canary ends, and a version in shadow is rejected, since no chat is left to compare them by.
    """
    session, policy = locked
    await _require_dispensable(session, policy, settings)
    if policy.state == PolicyState.ARCHIVED:
        return
    await traffic.require_no_dependents(session, policy, archived=False)
    await service.abort_canary(locked, Attribution(by.actor, POLICY_ARCHIVED))
    if (shadow := await repository.find_shadow_version(session, policy.id)) is not None:
        await service.reject_version(locked, shadow, actor=by.actor, reason=POLICY_ARCHIVED)
    await _set_state(locked, PolicyState.ARCHIVED, by)
    enqueue_after_commit(session, "reconcile")


async def unarchive(locked: LockedPolicy, by: Attribution) -> None:
    """Answer chats again, as soon as an engine has loaded what serves, and continue training. Idempotent."""
    session, policy = locked
    if policy.state == PolicyState.ARCHIVED:
        await _set_state(locked, PolicyState.ACTIVE, by)
        enqueue_after_commit(session, "reconcile", "evaluate", "publish", "assemble", "train")


async def delete_policy(locked: LockedPolicy, by: Attribution, settings: Settings) -> None:
    """Delete an archived policy for good. Its name is free at once; retention removes its versions' files.

    Raises Conflict for a policy that is not archived, or that others need.
    """
    session, policy = locked
    await _require_dispensable(session, policy, settings)
    if policy.state != PolicyState.ARCHIVED:
        message = f"'{policy.name}' is {policy.state}: archive it first, which can be undone; a deletion cannot."
        raise Conflict(message, code="policy_not_archived")
    await traffic.require_no_dependents(session, policy, archived=True)
    open_batches = select(Batch.id).where(Batch.policy_id == policy.id, Batch.state == BatchState.OPEN)
    batch_ids = list(await session.scalars(open_batches))
    await batch_samples.break_up_batches(locked, batch_ids, BatchState.FAILED, POLICY_DELETED)
    await session.execute(delete(Pin).where(Pin.policy_id == policy.id))
    is_open_plan = (RolloutPlan.policy_id == policy.id, RolloutPlan.state.in_((PlanState.RUNNING, PlanState.PAUSED)))
    ended = {"state": PlanState.CANCELLED, "reason": POLICY_DELETED, "settled_at": now()}
    await session.execute(update(RolloutPlan).where(*is_open_plan).values(ended))
    is_open_fit = (RewardModel.policy_id == policy.id, RewardModel.state == RewardModelState.OPEN)
    refused = {"state": RewardModelState.REFUSED, "reason": POLICY_DELETED, "fence": RewardModel.fence + 1}
    await session.execute(update(RewardModel).where(*is_open_fit).values(refused))
    audit_policy(session, policy, AuditAction.POLICY_DELETED, *by)
    policy.state, policy.state_reason, policy.state_since = PolicyState.DELETED, by.reason, now()
    policy.traffic_from_id = policy.traffic_share = None
    policy.name = f"{policy.name[:NAME_LENGTH]}~{policy.id[-6:]}"  # a name that no request can have
    enqueue_after_commit(session, "reconcile")


async def _require_dispensable(session: AsyncSession, policy: Policy, settings: Settings) -> None:
    """Raise Conflict for the policy that the deployment starts with, and for the last one that answers chats."""
    if policy.name == settings.policy:
        message = (
            f"'{policy.name}' is the policy that this deployment is started with (ATTUNE_POLICY): `attune up` would "
            "create it again. Pause it instead."
        )
        raise Conflict(message, code="default_policy")
    others = [one for one in await repository.list_policies(session, policy.project_id) if one.id != policy.id]
    if not others:
        message = f"'{policy.name}' is the only policy of this project that answers chats: create another one first."
        raise Conflict(message, code="last_policy")


async def _set_state(locked: LockedPolicy, state: PolicyState, by: Attribution) -> None:
    session, policy = locked
    if policy.state == state:
        return
    previous, policy.state = policy.state, state
    policy.state_reason, policy.state_since = by.reason, now()
    await session.flush()
    await session.refresh(policy)
    audit_policy(session, policy, AuditAction(f"policy.{state}"), *by, previous=previous)


def _is_archived(policy: Policy) -> Conflict:
    assert policy.state not in ANSWERING
    message = f"'{policy.name}' is archived: POST /v1/policies/{policy.name}/unarchive brings it back first."
    return Conflict(message, code="policy_archived")
