"""Create, join and read planned runs."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import and_, case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import database_time, dialect_insert, now
from app.core.errors import Conflict, NotFound, require_row
from app.core.leases import lease_is_free
from app.core.pagination import apply_keyset
from app.core.settings import Settings
from app.environments.schemas import AttemptCounts, Plan, RunRequest, RunView
from app.models import ANSWERING, AttemptState, Episode, PlannedRun, Policy, RunAttempt, new_id
from app.policies import repository as policies
from app.policies.overrides import effective_settings

UNDER_WAY = "under_way"


async def create_or_join(session: AsyncSession, project_id: str, request: RunRequest) -> tuple[PlannedRun, bool]:
    """Return the run of this name, and whether it was created now. It gets more tasks if more are wanted.

    Raises NotFound for an unknown policy, and Conflict for a run of the same name that has another plan, or that was
    cancelled.
    """
    plan = request.plan()
    policy = await policies.find_policy(session, project_id, plan.policy)
    policy = require_row(policy, f"There is no policy '{plan.policy}'.", param="policy")
    if policy.state not in ANSWERING:
        message = f"Policy '{policy.name}' is archived and answers no chats."
        raise NotFound(message, code="policy_archived", param="policy")
    id = new_id("run")
    insert = dialect_insert(session, PlannedRun).values(
        id=id,
        project_id=project_id,
        policy_id=policy.id,
        name=request.name,
        plan=plan.model_dump(mode="json"),
        num_tasks=request.num_tasks,
        num_added=0,
        created_at=now(),
    )
    await session.execute(insert.on_conflict_do_nothing())
    run = await get_run(session, project_id, request.name, for_update=True)
    if run.id == id:
        return run, True
    if run.cancelled_at is not None:
        message = f"The run '{run.name}' was cancelled. Give this run another name."
        raise Conflict(message, code="run_cancelled", param="name")
    _require_same(run, plan, request.num_tasks)
    run.num_tasks = request.num_tasks
    return run, False


def _require_same(run: PlannedRun, plan: Plan, num_tasks: int) -> None:
    """Raise Conflict, with the name of the first field that differs, unless the plan is that of the run."""
    recorded = plan_of(run)
    names = [name for name in Plan.model_fields if getattr(recorded, name) != getattr(plan, name)]
    if None in (recorded.description_sha256, plan.description_sha256):
        names = [name for name in names if name != "description_sha256"]
    if not names and num_tasks >= run.num_tasks:
        return
    field = names[0] if names else "num_tasks"
    if field in ("metadata", "limits"):
        field = f"{field}.{_first_difference(_as_dict(recorded, field), _as_dict(plan, field))}"
    what = {
        "num_tasks": f"has {run.num_tasks} tasks already; it may get more, but not fewer",
        "description_sha256": "was begun with another description of its attempts, such as another simulated user",
    }.get(field, f"was begun with another '{field}'")
    message = f"The run '{run.name}' {what}. Send the same plan to join it, or give this run another name."
    raise Conflict(message, code="run_plan_differs", param=field)


def _as_dict(plan: Plan, field: str) -> dict[str, object]:
    value: dict[str, object] = plan.model_dump()[field]
    return value


def _first_difference(one: dict[str, object], other: dict[str, object]) -> str:
    return next(name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name))


def plan_of(run: PlannedRun) -> Plan:
    """Return the plan of a run."""
    return Plan.model_validate(run.plan)


async def get_run(session: AsyncSession, project_id: str, name: str, *, for_update: bool = False) -> PlannedRun:
    """Return a run of the project. Raises NotFound."""
    query = select(PlannedRun).where(PlannedRun.project_id == project_id, PlannedRun.name == name)
    run = await session.scalar(query.with_for_update() if for_update else query)
    return require_row(run, f"There is no run '{name}'.", param="run")


async def cancel(session: AsyncSession, project_id: str, name: str) -> PlannedRun:
    """Let no attempt of the run begin any more. Those under way go on. Returns the run; raises NotFound."""
    run = await get_run(session, project_id, name, for_update=True)
    run.cancelled_at = run.cancelled_at or await database_time(session)
    return run


async def read_failure_outcome(session: AsyncSession, settings: Settings, project_id: str, name: str) -> float | None:
    """Return the outcome that the run's policy gives a failure without one (`rewards.episode_failure`)."""
    run = await get_run(session, project_id, name)
    policy = await session.get_one(Policy, run.policy_id)
    return effective_settings(policy, settings).rewards.episode_failure


async def list_page(
    session: AsyncSession, settings: Settings, project_id: str, *, after: str | None, limit: int, newest_first: bool
) -> list[RunView]:
    """Return up to `limit + 1` runs by creation time. Raises NotFound for an unknown `after`."""
    last: Any = None
    if after is not None:
        run = await session.scalar(
            select(PlannedRun).where(PlannedRun.project_id == project_id, PlannedRun.name == after)
        )
        last = require_row(run, f"There is no run '{after}'.", param="after")
    query = select(PlannedRun).where(PlannedRun.project_id == project_id)
    keyset = (PlannedRun.created_at, PlannedRun.id)
    runs = await session.scalars(apply_keyset(query, keyset, last, limit, descending=newest_first))
    return await view_runs(session, settings, list(runs))


async def view_run(session: AsyncSession, settings: Settings, run: PlannedRun) -> RunView:
    [view] = await view_runs(session, settings, [run])
    return view


async def view_runs(session: AsyncSession, settings: Settings, runs: Sequence[PlannedRun]) -> list[RunView]:
    """Return the views of the runs, in their order."""
    ids = [run.id for run in runs]
    is_under_way = and_(RunAttempt.state == AttemptState.OPEN, ~lease_is_free(RunAttempt))
    state = case((is_under_way, UNDER_WAY), else_=RunAttempt.state)
    counting = select(RunAttempt.run_id, state, func.count()).where(RunAttempt.run_id.in_(ids))
    counts: dict[str, dict[str, int]] = {id: {} for id in ids}
    counting = counting.group_by(RunAttempt.run_id, state).order_by(RunAttempt.run_id, state)
    for run_id, name, number in await session.execute(counting):
        counts[run_id][name] = number
    ending = (
        select(RunAttempt.run_id, Episode.end_reason, func.count(), func.count(Episode.outcome))
        .add_columns(func.coalesce(func.sum(Episode.outcome), 0.0))
        .join(Episode, Episode.id == RunAttempt.episode_id)
        .where(RunAttempt.run_id.in_(ids), RunAttempt.state == AttemptState.DONE)
        .group_by(RunAttempt.run_id, Episode.end_reason)
        .order_by(RunAttempt.run_id, Episode.end_reason)
    )
    ends: dict[str, list[tuple[str, int, int, float]]] = {id: [] for id in ids}
    for run_id, reason, number, num_graded, total in await session.execute(ending):
        ends[run_id].append((reason, number, num_graded, total))
    return [_view(run, settings, counts[run.id], ends[run.id]) for run in runs]


def _view(
    run: PlannedRun, settings: Settings, counts: dict[str, int], ends: Sequence[tuple[str, int, int, float]]
) -> RunView:
    plan = plan_of(run)
    num_waiting = counts.get(AttemptState.OPEN, 0) + max(0, run.num_tasks - run.num_added) * plan.group_size
    is_cancelled = run.cancelled_at is not None
    attempts = AttemptCounts(
        waiting=0 if is_cancelled else num_waiting,
        under_way=counts.get(UNDER_WAY, 0),
        done=counts.get(AttemptState.DONE, 0),
        lost=counts.get(AttemptState.LOST, 0),
        cancelled=counts.get(AttemptState.CANCELLED, 0) + (num_waiting if is_cancelled else 0),
    )
    num_graded = sum(number for _, _, number, _ in ends)
    total = sum(outcome for *_, outcome in ends)
    return RunView(
        name=run.name,
        **plan.model_dump(exclude={"description_sha256"}),
        num_tasks=run.num_tasks,
        attempts=attempts,
        ends={reason: number for reason, number, _, _ in ends},
        mean_outcome=total / num_graded if num_graded else None,
        is_complete=attempts.waiting == attempts.under_way == 0,
        lease_seconds=settings.workers.lease_seconds,
        created_at=run.created_at,
        cancelled_at=run.cancelled_at,
    )
