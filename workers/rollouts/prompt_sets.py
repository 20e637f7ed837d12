"""Plans → Rollouts: the next prompts of a set, asked of the version that serves, as far as there is room for them."""

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, now
from app.core.settings import Settings
from app.inference.request import Sampling
from app.models import (
    DatasetRow,
    LearningMode,
    Origin,
    PlanState,
    Policy,
    Project,
    Rollout,
    RolloutPlan,
    RolloutState,
    Sample,
    SampleState,
    Version,
    new_id,
    record_audit,
)
from app.policies import repository as policies
from app.training.batch_caps import cap
from app.training.rollouts.config import rollouts_of
from workers.rollouts.group_sampling import write
from workers.rollouts.queue import Room

EXPIRES_SECONDS = 600.0  # a group is written down when there is room for it: this long it has to find it
LEAST_FAILED = 8
UNLEARNED = (SampleState.OPEN, SampleState.QUARANTINED, SampleState.BATCHED)


async def advance(db: Database, settings: Settings) -> None:
    """Each running plan by as many prompts as its engines have room for."""
    async with db.read() as session:
        ids = list(
            await session.scalars(
                select(RolloutPlan.id).where(RolloutPlan.state == PlanState.RUNNING).order_by(RolloutPlan.created_at)
            )
        )
    for plan_id in ids:
        while await _step(db, settings, plan_id):
            pass


async def _step(db: Database, settings: Settings, plan_id: str) -> bool:
    """One prompt further. The plan's row is locked, and moves in the transaction that writes its rollouts: whoever
    dies in between has asked nothing, and nobody asks the same twice."""
    async with db.read() as session:  # a look costs people nothing; a write may
        plan = await session.get_one(RolloutPlan, plan_id)
        if not await _has_something_to_do(session, plan, settings):
            return False
    async with db.write() as session:
        locked = select(RolloutPlan).where(RolloutPlan.id == plan_id, RolloutPlan.state == PlanState.RUNNING)
        found = await session.scalar(locked.with_for_update(skip_locked=True))
        if found is None or not await _has_something_to_do(session, found, settings):
            return False
        if (reason := await _broken(session, found)) is not None:
            _end(session, found, PlanState.FAILED, reason)
            return False
        if found.pass_number >= found.passes:
            _end(session, found, PlanState.DONE, None)
            return False
        return await _ask(session, found, settings)


async def _has_something_to_do(session: AsyncSession, plan: RolloutPlan, settings: Settings) -> bool:
    open_ones = await _open(session, plan)
    if plan.pass_number >= plan.passes:
        return open_ones == 0
    if await _broken(session, plan) is not None:
        return True
    policy = await session.get_one(Policy, plan.policy_id)
    if policy.mode == LearningMode.HALTED:
        return False
    version = await _serving(session, plan)
    room = await Room.of(session)
    config = rollouts_of(policy, settings)
    if room.for_one(policy, version, settings) is None or open_ones >= config.in_flight * len(room.holders(version)):
        return False
    waiting = open_ones + await _unlearned(session, plan)
    if plan.prompts_per_version is not None:  # one more round if nothing of the last is left to make a version of
        return plan.version_id != version.id or plan.version_prompts < plan.prompts_per_version or waiting == 0
    return waiting + plan.n <= max(plan.n, cap(config.max_plan_share, settings.batch_size))


async def _open(session: AsyncSession, plan: RolloutPlan) -> int:
    asked = select(func.count()).where(Rollout.plan_id == plan.id, Rollout.state == RolloutState.OPEN)
    return int(await session.scalar(asked) or 0)


async def _unlearned(session: AsyncSession, plan: RolloutPlan) -> int:
    """Replies that wait for an update."""
    asked = (
        select(func.count())
        .select_from(Sample)
        .join(Rollout, Rollout.id == Sample.turn_id)
        .where(Rollout.plan_id == plan.id, Sample.policy_id == plan.policy_id, Sample.state.in_(UNLEARNED))
    )
    return int(await session.scalar(asked) or 0)


async def _serving(session: AsyncSession, plan: RolloutPlan) -> Version:
    return await policies.version(session, (await policies.deployment_of(session, plan.policy_id)).version_id)


async def _broken(session: AsyncSession, plan: RolloutPlan) -> str | None:
    """Why it cannot go on, if it cannot."""
    if plan.pass_number < plan.passes and await session.get(DatasetRow, (plan.dataset_id, plan.position)) is None:
        return f"Dataset '{plan.dataset}' is gone."
    if not (await session.get_one(Project, plan.project_id)).train:
        return "The project does not let its turns be learned from."
    most = max(LEAST_FAILED, 2 * plan.n)
    last = await session.execute(
        select(Rollout.state, Rollout.reason)
        .where(Rollout.plan_id == plan.id, Rollout.settled_at.is_not(None))
        .order_by(Rollout.settled_at.desc())
        .limit(most)
    )
    rows = list(last)
    if len(rows) == most and all(state == RolloutState.FAILED for state, _ in rows):
        return f"The last {most} replies failed: {rows[0][1]}"
    return None


async def _ask(session: AsyncSession, plan: RolloutPlan, settings: Settings) -> bool:
    policy = await session.get_one(Policy, plan.policy_id)
    version = await _serving(session, plan)
    engine = (await Room.of(session)).for_one(policy, version, settings)
    row = await session.get(DatasetRow, (plan.dataset_id, plan.position))
    if engine is None or row is None:
        return False
    ids = [new_id("chatcmpl") for _ in range(plan.n)]
    common: dict[str, Any] = {
        "completion_id": ids[0],
        "project_id": plan.project_id,
        "policy_id": plan.policy_id,
        "version_id": version.id,
        "engine": engine.name,
        "origin": Origin.PROMPT_SET,
        "messages": row.content["messages"],
        "sampling": Sampling(plan.max_tokens, plan.temperature).body(),
        "processed": True,  # its verifier says what it is worth: no other source is asked
    }
    turns = [common | {"id": id, "choice_index": place} for place, id in enumerate(ids)]
    asked = {"plan_id": plan.id, "pass_number": plan.pass_number, "row_number": plan.position}
    await write(session, turns, expires_in=EXPIRES_SECONDS, **asked)
    fresh = plan.version_id != version.id or (
        plan.prompts_per_version is not None and plan.version_prompts >= plan.prompts_per_version
    )
    plan.version_id, plan.version_prompts = version.id, 1 if fresh else plan.version_prompts + 1
    plan.position += 1
    if plan.position >= plan.num_prompts:
        plan.pass_number, plan.position = plan.pass_number + 1, 0
    return True


def _end(session: AsyncSession, plan: RolloutPlan, state: PlanState, reason: str | None) -> None:
    plan.state, plan.reason, plan.settled_at = state, reason, now()
    record_audit(session, "rollout", f"plan {state}", plan.id, reason, project_id=plan.project_id, dataset=plan.dataset)
