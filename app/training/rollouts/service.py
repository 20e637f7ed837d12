"""Rollout plans: creating, pausing, resuming and cancelling them. Every change is audited."""

from typing import Any

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment import extensions
from alignment.signals import verifiers
from alignment.signals.verifiers import Custom, VerifierConfig
from app.core.database import now
from app.core.errors import BadRequest, Conflict, NotFound
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import (
    AuditAction,
    Dataset,
    DatasetKind,
    DatasetRow,
    PlanState,
    Policy,
    Project,
    RolloutPlan,
    new_id,
    record_audit,
)
from app.training.rollouts.config import needs_reference
from app.training.rollouts.schemas import PlanRequest

FINAL_STATES = (PlanState.DONE, PlanState.FAILED, PlanState.CANCELLED)
# By verb: the new state, and the states that it may follow.
TRANSITIONS: dict[str, tuple[PlanState, tuple[PlanState, ...]]] = {
    "pause": (PlanState.PAUSED, (PlanState.RUNNING,)),
    "resume": (PlanState.RUNNING, (PlanState.PAUSED,)),
    "cancel": (PlanState.CANCELLED, (PlanState.RUNNING, PlanState.PAUSED)),
}


async def create_plan(
    session: AsyncSession, policy: Policy, request: PlanRequest, settings: Settings, *, actor: str
) -> RolloutPlan:
    """Create a plan that runs at once. Raises BadRequest, NotFound, Conflict."""
    dataset = await _get_prompt_set(session, policy.project_id, request.dataset)
    await _check_verifier(session, request.verifier, dataset, settings)
    if not (await session.get_one(Project, policy.project_id)).train:
        raise Conflict("The project does not consent to training on its turns.", code="no_consent")
    limit = settings.output_token_cap // request.n
    if request.max_tokens is not None and request.max_tokens > limit:
        raise BadRequest(
            f"max_tokens: {request.n} replies may have {limit} tokens each at most, because together they may have "
            f"what one request may have.",
            param="max_tokens",
            code="invalid_value",
        )
    plan = RolloutPlan(
        id=new_id("plan"),
        project_id=policy.project_id,
        policy_id=policy.id,
        dataset_id=dataset.id,
        dataset=dataset.name,
        num_prompts=dataset.num_rows,
        verifier=request.verifier.model_dump(mode="json", by_alias=True),
        max_tokens=request.max_tokens or min(settings.max_output_tokens, limit),
        **request.model_dump(include={"n", "passes", "temperature", "prompts_per_version"}),
    )
    session.add(plan)
    await session.flush()
    record_audit(
        session,
        actor,
        AuditAction.ROLLOUT_PLAN_CREATED,
        plan.id,
        project_id=policy.project_id,
        policy=policy.name,
        n=request.n,
    )
    enqueue_after_commit(session, "rollout")
    return plan


async def _get_prompt_set(session: AsyncSession, project_id: str, id_or_name: str) -> Dataset:
    matches = or_(Dataset.id == id_or_name, Dataset.name == id_or_name)
    dataset = await session.scalar(select(Dataset).where(Dataset.project_id == project_id, matches).limit(1))
    if dataset is None:
        raise NotFound(f"There is no dataset '{id_or_name}'.", param="dataset")
    if dataset.kind != DatasetKind.PROMPTS:
        raise BadRequest(
            f"Dataset '{dataset.name}' is of the kind {dataset.kind}; a plan needs the kind prompts.",
            param="dataset",
            code="invalid_value",
        )
    return dataset


async def _check_verifier(
    session: AsyncSession, verifier: VerifierConfig, dataset: Dataset, settings: Settings
) -> None:
    if isinstance(verifier, Custom):
        known = extensions.extension_names(verifiers.ENTRY_POINTS, settings.rollouts.verifiers)
        if verifier.name not in known:
            raise BadRequest(
                f"verifier.name: known verifiers are {', '.join(known) or 'none'}.",
                param="verifier.name",
                code="invalid_value",
            )
    if needs_reference(verifier):
        first = await session.get(DatasetRow, (dataset.id, 0))
        if first is None or not first.content.get("reference"):
            raise BadRequest(
                f"The verifier '{verifier.type}' needs a column 'reference', and '{dataset.name}' has none.",
                param="verifier",
                code="invalid_value",
            )


async def change_plan_state(
    session: AsyncSession, policy: Policy, plan: RolloutPlan, verb: str, *, actor: str, reason: str | None
) -> None:
    """Pause, resume or cancel a plan whose row is locked. Idempotent. Raises Conflict."""
    state, before = TRANSITIONS[verb]
    if plan.state == state:
        return
    if plan.state not in before:
        raise Conflict(f"Plan '{plan.id}' is {plan.state}; it cannot {verb}.", code="plan_ended")
    values: dict[str, Any] = {"state": state, "reason": reason}
    if state in FINAL_STATES:
        values["settled_at"] = now()
    await session.execute(
        update(RolloutPlan)
        .where(RolloutPlan.id == plan.id)
        .values(**values)
        .execution_options(synchronize_session=False)
    )
    await session.refresh(plan)
    record_audit(
        session,
        actor,
        AuditAction(f"rollout_plan.{state}"),
        plan.id,
        reason,
        project_id=plan.project_id,
        policy=policy.name,
    )
    enqueue_after_commit(session, "rollout")
