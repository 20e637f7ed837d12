"""Rollouts: their counts, and the plans that let a policy answer a prompt set. Every change of a plan is audited."""

from collections import defaultdict
from typing import Any, NamedTuple

from pydantic import Field
from sqlalchemy import ColumnElement, and_, case, func, or_, select, union_all, update
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.signals.verifiers import Choice, Contains, Custom, Exact, JsonSchema, Number, Regex, VerifierConfig
from app.core.database import Database, dialect_insert, now
from app.core.errors import BadRequest, Conflict, require_row
from app.core.http import StrictModel
from app.core.jobs import enqueue_after_commit
from app.core.pagination import apply_keyset
from app.core.settings import Settings
from app.models import (
    AuditAction,
    Dataset,
    DatasetKind,
    DatasetRow,
    Origin,
    PlanState,
    Policy,
    Project,
    Rollout,
    RolloutPlan,
    RolloutState,
    RolloutTotal,
    new_id,
)
from app.policies.override_checks import check_verifier_name, invalid_value
from app.policies.service import audit_policy

COUNT_STEP = 5000
# By verb: the new state, and the states that it may follow.
TRANSITIONS: dict[str, tuple[PlanState, tuple[PlanState, ...]]] = {
    "pause": (PlanState.PAUSED, (PlanState.RUNNING,)),
    "resume": (PlanState.RUNNING, (PlanState.PAUSED,)),
    "cancel": (PlanState.CANCELLED, (PlanState.RUNNING, PlanState.PAUSED)),
}


class PlanRequest(StrictModel):
    dataset: str = Field(min_length=1, max_length=64, description="name or id of a dataset of the kind prompts")
    verifier: VerifierConfig
    n: int = Field(8, ge=2, le=16, description="replies to each prompt, which are compared with each other")
    passes: int = Field(1, ge=1, le=1000, description="passes over the whole dataset")
    temperature: float = Field(1.0, ge=0.01, le=2)
    max_tokens: int | None = Field(None, ge=1, description="of one reply; null: the deployment's limit")
    prompts_per_version: int | None = Field(
        None, ge=1, le=100_000, description="prompts that one version answers; null: as many as a batch holds"
    )


class RolloutCounts(NamedTuple):
    """Rollouts by state, their tokens and seconds, the number of verified ones and the sum of their rewards."""

    open: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    verified: int = 0
    reward: float = 0.0


COUNT_COLUMNS: tuple[ColumnElement[Any], ...] = (
    *(func.count(case((Rollout.state == state, 1))) for state in RolloutState),
    func.coalesce(func.sum(Rollout.tokens), 0),
    func.coalesce(func.sum(Rollout.duration_seconds), 0.0),
    func.count(Rollout.reward),
    func.coalesce(func.sum(Rollout.reward), 0.0),
)


async def count_rollouts(session: AsyncSession, *conditions: ColumnElement[bool]) -> RolloutCounts:
    return RolloutCounts(*(await session.execute(select(*COUNT_COLUMNS).where(*conditions))).one())


async def count_by_plan(session: AsyncSession, plan_ids: list[str]) -> dict[str, RolloutCounts]:
    query = select(Rollout.plan_id, *COUNT_COLUMNS).where(Rollout.plan_id.in_(plan_ids)).group_by(Rollout.plan_id)
    return {str(row[0]): RolloutCounts(*row[1:]) for row in await session.execute(query)}


async def count_recent_tokens(session: AsyncSession, policy_id: str, origin: Origin) -> int:
    """Return the tokens of the policy's rollouts of this origin in the last hour, with the budget of running ones."""
    recent = or_(Rollout.settled_at > now() - 3600, and_(Rollout.settled_at.is_(None), Rollout.tokens > 0))
    query = select(func.sum(Rollout.tokens)).where(Rollout.policy_id == policy_id, Rollout.origin == origin, recent)
    return int(await session.scalar(query) or 0)


async def get_plan(session: AsyncSession, policy_id: str, plan_id: str, *, lock: bool = False) -> RolloutPlan:
    """Return the plan, with its row locked if `lock`. Raises NotFound."""
    query = select(RolloutPlan).where(RolloutPlan.id == plan_id, RolloutPlan.policy_id == policy_id)
    plan = await session.scalar(query.with_for_update() if lock else query)
    return require_row(plan, f"There is no plan '{plan_id}'.", param="plan_id")


async def list_plans(session: AsyncSession, policy_id: str, after: str | None, limit: int) -> list[RolloutPlan]:
    """Return up to `limit + 1` plans, the newest first. Raises NotFound."""
    last = None if after is None else await get_plan(session, policy_id, after)
    query = select(RolloutPlan).where(RolloutPlan.policy_id == policy_id)
    query = apply_keyset(query, (RolloutPlan.created_at, RolloutPlan.id), last, limit, descending=True)
    return list(await session.scalars(query))


def count_by_state(connection: Connection) -> list[tuple[str, str, str, int, int]]:
    """Return (policy id, origin, state, number of rollouts, tokens) of all policies, for the metrics.

    Settled rollouts never change, so those that `count_settled_rollouts` has counted are read as totals.
    """
    others = select(
        Rollout.policy_id, Rollout.origin, Rollout.state, func.count().label("num_rollouts"), func.sum(Rollout.tokens)
    )
    others = others.where(~Rollout.counted).group_by(Rollout.policy_id, Rollout.origin, Rollout.state)
    totals = select(*RolloutTotal.__table__.columns)
    counts: dict[tuple[str, str, str], tuple[int, int]] = {}
    for policy_id, origin, state, count, tokens in connection.execute(union_all(totals, others)):
        before = counts.get((policy_id, origin, state), (0, 0))
        counts[policy_id, origin, state] = (before[0] + count, before[1] + int(tokens))
    return [(*key, *numbers) for key, numbers in sorted(counts.items())]


async def count_settled_rollouts(db: Database) -> int:
    """Count up to COUNT_STEP settled rollouts into totals; return how many."""
    return await db.retry_on_deadlock(_count_settled)


async def _count_settled(session: AsyncSession) -> int:
    is_settled = (~Rollout.counted, Rollout.state != RolloutState.OPEN)
    ids = select(Rollout.id).where(*is_settled).limit(COUNT_STEP).with_for_update(skip_locked=True)
    count = update(Rollout).where(Rollout.id.in_(ids)).values(counted=True)
    rows = await session.execute(count.returning(Rollout.policy_id, Rollout.origin, Rollout.state, Rollout.tokens))
    totals: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for policy_id, origin, state, tokens in rows:
        totals[policy_id, origin, state].append(tokens)
    for (policy_id, origin, state), settled in sorted(totals.items()):
        numbers = {"num_rollouts": len(settled), "tokens": sum(settled)}
        key = {"policy_id": policy_id, "origin": origin, "state": state}
        insert = dialect_insert(session, RolloutTotal).values(**key, **numbers)
        added = {name: getattr(RolloutTotal, name) + insert.excluded[name] for name in numbers}
        await session.execute(insert.on_conflict_do_update(index_elements=list(key), set_=added))
    return sum(map(len, totals.values()))


async def create_plan(
    session: AsyncSession, policy: Policy, request: PlanRequest, settings: Settings, *, actor: str
) -> RolloutPlan:
    """Create a plan that runs at once. Raises BadRequest, NotFound, Conflict."""
    dataset = await _get_prompt_set(session, policy.project_id, request.dataset)
    await _check_verifier(session, request.verifier, dataset, settings)
    if not (await session.get_one(Project, policy.project_id)).train:
        raise Conflict("The project does not consent to training on its turns.", code="no_consent")
    limit = settings.limits.max_output_tokens // request.n
    if request.max_tokens is not None and request.max_tokens > limit:
        reason = "because together they may have what one request may have"
        raise invalid_value("max_tokens", f"{request.n} replies may have {limit} tokens each at most, {reason}.")
    plan = RolloutPlan(
        id=new_id("plan"),
        project_id=policy.project_id,
        policy_id=policy.id,
        dataset_id=dataset.id,
        dataset=dataset.name,
        num_prompts=dataset.num_rows,
        verifier=request.verifier.model_dump(mode="json", by_alias=True),
        max_tokens=request.max_tokens or min(settings.server.default_max_tokens, limit),
        **request.model_dump(include={"n", "passes", "temperature", "prompts_per_version"}),
    )
    session.add(plan)
    await session.flush()
    details: dict[str, object] = {"policy": policy.name, "n": request.n}
    audit_policy(session, policy, AuditAction.ROLLOUT_PLAN_CREATED, actor, subject=plan.id, **details)
    enqueue_after_commit(session, "rollout")
    return plan


async def _get_prompt_set(session: AsyncSession, project_id: str, id_or_name: str) -> Dataset:
    matches = or_(Dataset.id == id_or_name, Dataset.name == id_or_name)
    is_visible = (Dataset.project_id == project_id, Dataset.importing_until.is_(None))
    id_first = case((Dataset.id == id_or_name, 0), else_=1)
    row = await session.scalar(select(Dataset).where(*is_visible, matches).order_by(id_first, Dataset.id).limit(1))
    dataset = require_row(row, f"There is no dataset '{id_or_name}'.", param="dataset")
    if dataset.kind != DatasetKind.PROMPTS:
        message = f"Dataset '{dataset.name}' is of the kind {dataset.kind}; a plan needs the kind prompts."
        raise BadRequest(message, param="dataset", code="invalid_value")
    return dataset


async def _check_verifier(
    session: AsyncSession, verifier: VerifierConfig, dataset: Dataset, settings: Settings
) -> None:
    if isinstance(verifier, Custom):
        check_verifier_name(verifier, "verifier.name", settings)
    if _needs_reference(verifier):
        first = await session.get(DatasetRow, (dataset.id, 0))
        if first is None or not first.content.get("reference"):
            message = f"The verifier '{verifier.type}' needs a column 'reference', and '{dataset.name}' has none."
            raise BadRequest(message, param="verifier", code="invalid_value")


async def change_plan_state(
    session: AsyncSession, policy: Policy, plan: RolloutPlan, verb: str, *, actor: str, reason: str | None
) -> None:
    """Pause, resume or cancel a plan whose row is locked. Idempotent. Raises Conflict."""
    state, before = TRANSITIONS[verb]
    if plan.state == state:
        return
    if plan.state not in before:
        raise Conflict(f"Plan '{plan.id}' is {plan.state}; it cannot {verb}.", code="plan_ended")
    plan.state, plan.reason = state, reason
    if state == PlanState.CANCELLED:
        plan.settled_at = now()
    await session.flush()
    await session.refresh(plan)
    action = AuditAction(f"rollout_plan.{state}")
    audit_policy(session, policy, action, actor, reason, subject=plan.id, policy=policy.name)
    enqueue_after_commit(session, "rollout")


def _needs_reference(verifier: VerifierConfig) -> bool:
    """Whether the verifier compares replies with the `reference` of the prompt."""
    if isinstance(verifier, Regex):
        return verifier.pattern is None
    if isinstance(verifier, JsonSchema):
        return verifier.schema_ is None
    return isinstance(verifier, Exact | Contains | Number | Choice)
