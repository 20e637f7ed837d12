"""Prompt sets: plans → rollouts of the next prompts by the live version, and the verifier that scores the replies."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.errors import AlignmentError
from alignment.signals.verifiers import VerifierInput
from app.chat.new_turn import NewTurn
from app.core.database import Database, now
from app.core.run_each import run_each, take_turns
from app.core.settings import Settings
from app.inference.capture import Capture
from app.inference.request import Sampling
from app.models import (
    AuditAction,
    DatasetRow,
    Engine,
    LearningMode,
    Origin,
    PlanState,
    Policy,
    PolicyState,
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
from app.policies.overrides import effective_settings
from app.training.caps import max_samples
from app.training.policy_config import effective_rollouts, load_verifier
from workers.queue.run_user_code import UserCodeError, run_user_code
from workers.rollouts.rollout_queue import EngineCapacity, create_rollouts

EXPIRES_SECONDS = 600.0  # until a group must be claimed; it is created when an engine has capacity
MIN_FAILED_REPLIES = 8
VERIFIER_SECONDS = 10.0
UNTRAINED_STATES = (SampleState.OPEN, SampleState.QUARANTINED, SampleState.BATCHED)


class VerifierError(Exception):
    """The verifier failed, or returned something other than a reward."""


class PlanEnd(NamedTuple):
    """The final state of a plan, and why it failed."""

    state: PlanState
    reason: str | None = None


class NextPrompt(NamedTuple):
    """The plan's next prompt, the version that replies to it, and an engine with capacity."""

    row: DatasetRow
    version: Version
    engine: Engine


async def advance_plans(db: Database, settings: Settings) -> None:
    """Create the rollouts of each running plan for as many prompts as its engines have capacity for."""
    async with db.read() as session:
        running = (
            select(Policy.project_id, RolloutPlan.id)
            .join(Policy, Policy.id == RolloutPlan.policy_id)
            .where(RolloutPlan.state == PlanState.RUNNING)
            .order_by(RolloutPlan.created_at, RolloutPlan.id)
        )
        plan_ids = take_turns((await session.execute(running)).tuples())

    async def advance(plan_id: str) -> None:
        while await _advance_plan(db, settings, plan_id):
            pass

    await run_each(plan_ids, advance, "rollout plan")


async def _advance_plan(db: Database, settings: Settings, plan_id: str) -> bool:
    """Advance the plan by one prompt. Returns False if there is nothing to do.

    The plan's row is locked and moves in the transaction that creates its rollouts, so a worker that dies in between
    has created nothing, and no prompt is sampled twice in a pass.
    """
    async with db.read() as session:  # a read blocks nobody; on SQLite a write blocks other writers
        plan = await session.get_one(RolloutPlan, plan_id)
        if await _find_next_step(session, plan, settings) is None:
            return False
    async with db.write() as session:
        select_plan = select(RolloutPlan).where(RolloutPlan.id == plan_id, RolloutPlan.state == PlanState.RUNNING)
        locked_plan = await session.scalar(select_plan.with_for_update(skip_locked=True))
        if locked_plan is None:
            return False
        step = await _find_next_step(session, locked_plan, settings)
        if isinstance(step, NextPrompt):
            await _create_group(session, locked_plan, step, shares_histories=settings.database.share_histories)
        elif step is not None:
            _finish_plan(session, locked_plan, *step)
    return isinstance(step, NextPrompt)


async def _find_next_step(session: AsyncSession, plan: RolloutPlan, settings: Settings) -> NextPrompt | PlanEnd | None:
    """Return the prompt to sample now, or how the plan ends; None if it has to wait."""
    open_rollouts = select(func.count()).where(Rollout.plan_id == plan.id, Rollout.state == RolloutState.OPEN)
    num_open = (await session.execute(open_rollouts)).scalar_one()
    row = None
    if plan.pass_number < plan.passes:
        row = await session.get(DatasetRow, (plan.dataset_id, plan.position))
        if row is None:
            return PlanEnd(PlanState.FAILED, f"Dataset '{plan.dataset}' was deleted.")
    elif num_open:
        return None
    if (reason := await _find_failure(session, plan)) is not None:
        return PlanEnd(PlanState.FAILED, reason)
    if row is None:
        return PlanEnd(PlanState.DONE)
    policy = await session.get_one(Policy, plan.policy_id)
    version = await policies.get_version(session, (await policies.get_deployment(session, plan.policy_id)).version_id)
    capacity, config = await EngineCapacity.read(session), effective_rollouts(policy, settings)
    engine = capacity.choose_engine(policy, version, settings)
    if policy.mode == LearningMode.HALTED or policy.state != PolicyState.ACTIVE or engine is None:
        return None
    if num_open >= config.in_flight * len(capacity.engines_with(version)):
        return None
    untrained = select(func.count()).select_from(Sample).join(Rollout, Rollout.id == Sample.turn_id)
    untrained = untrained.where(
        Rollout.plan_id == plan.id, Sample.policy_id == plan.policy_id, Sample.state.in_(UNTRAINED_STATES)
    )
    num_waiting = num_open + (await session.execute(untrained)).scalar_one()
    if plan.prompts_per_version is not None:
        # One more round if nothing of the last one is left to train the next version on.
        may_sample = plan.version_id != version.id or plan.version_prompts < plan.prompts_per_version
        may_sample = may_sample or num_waiting == 0
    else:
        may_sample = num_waiting + plan.n <= max(
            plan.n, max_samples(config.max_plan_share, effective_settings(policy, settings).trainer.batch_size)
        )
    return NextPrompt(row, version, engine) if may_sample else None


async def _find_failure(session: AsyncSession, plan: RolloutPlan) -> str | None:
    """Return why the plan cannot go on, None if it can."""
    if not (await session.get_one(Project, plan.project_id)).train:
        return "The project does not allow training on its turns."
    num_replies = max(MIN_FAILED_REPLIES, 2 * plan.n)
    result = await session.execute(
        select(Rollout.state, Rollout.reason)
        .where(Rollout.plan_id == plan.id, Rollout.settled_at.is_not(None))
        .order_by(Rollout.settled_at.desc(), Rollout.id.desc())
        .limit(num_replies)
    )
    rows = list(result)
    if len(rows) == num_replies and all(state == RolloutState.FAILED for state, _ in rows):
        return f"The last {num_replies} replies failed: {rows[0][1]}"
    return None


async def _create_group(
    session: AsyncSession, plan: RolloutPlan, prompt: NextPrompt, *, shares_histories: bool
) -> None:
    """Create the rollouts of the plan's next prompt, and move the plan on."""
    version = prompt.version
    ids, messages = [new_id("chatcmpl") for _ in range(plan.n)], prompt.row.content["messages"]
    first = NewTurn(
        id=ids[0],
        completion_id=ids[0],
        choice_index=0,
        project_id=plan.project_id,
        policy_id=plan.policy_id,
        version_id=version.id,
        engine=prompt.engine.name,
        origin=Origin.PROMPT_SET,
        own_messages=messages,
        sampling=Sampling(plan.max_tokens, plan.temperature).body(),
        processed=True,  # its verifier gives the reward: no other source is asked
    )
    other = first
    if shares_histories:
        other = replace(first, history_id=first.id, num_history_messages=len(messages), own_messages=[])
    turns = [first, *(replace(other, id=id, choice_index=index) for index, id in enumerate(ids[1:], start=1))]
    plan_values = {"plan_id": plan.id, "pass_number": plan.pass_number, "row_number": plan.position}
    await create_rollouts(session, turns, expires_in=EXPIRES_SECONDS, **plan_values)
    starts_round = plan.version_id != version.id or (
        plan.prompts_per_version is not None and plan.version_prompts >= plan.prompts_per_version
    )
    plan.version_id, plan.version_prompts = version.id, 1 if starts_round else plan.version_prompts + 1
    plan.position += 1
    if plan.position >= plan.num_prompts:
        plan.pass_number, plan.position = plan.pass_number + 1, 0


def _finish_plan(session: AsyncSession, plan: RolloutPlan, state: PlanState, reason: str | None) -> None:
    plan.state, plan.reason, plan.settled_at = state, reason, now()
    details = {"project_id": plan.project_id, "dataset": plan.dataset}
    record_audit(session, "rollout", AuditAction(f"rollout_plan.{state}"), plan.id, reason, **details)


async def verify_reply(
    verifier_config: dict[str, Any], settings: Settings, row_content: Mapping[str, Any], capture: Capture
) -> float | None:
    """Return the verifier's reward for a reply, in [-1, 1], or None if the verifier has no opinion.

    `row_content` is the content of the dataset's row. Raises VerifierError.
    """
    verifier_input = VerifierInput(
        messages=tuple(row_content["messages"]),
        reply=capture.message,
        reference=row_content.get("reference"),
        finish_reason=capture.finish_reason,
        details=row_content.get("details", {}),
    )
    try:
        value = await run_user_code(
            lambda: load_verifier(verifier_config, settings)(verifier_input),
            VERIFIER_SECONDS,
            noun="verifier",
            reraise=(AlignmentError,),
        )
    except (UserCodeError, AlignmentError) as error:
        raise VerifierError(f"the verifier failed: {error}") from error
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > 1:
        raise VerifierError(f"the verifier returned {str(value)[:100]!r}, which is not a number between -1 and 1")
    return float(value)
