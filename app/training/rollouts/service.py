"""Settings and plans, as admins set them: valid, of their own project, and on record in the audit."""

from typing import Any

import orjson
from pydantic import ValidationError
from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment import extensions
from alignment.config.rollouts import RolloutsConfig, above
from alignment.signals import verifiers
from alignment.signals.verifiers import Choice, Contains, Custom, Exact, JsonSchema, Number, Regex, VerifierConfig
from app.core.database import now
from app.core.errors import BadRequest, Conflict, NotFound
from app.core.http import validation_error
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import (
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
from app.training.rollouts.schemas import PlanRequest

ENDED = (PlanState.DONE, PlanState.FAILED, PlanState.CANCELLED)
# What a verb does: to which state, and from which.
STEPS: dict[str, tuple[PlanState, tuple[PlanState, ...]]] = {
    "pause": (PlanState.PAUSED, (PlanState.RUNNING,)),
    "resume": (PlanState.RUNNING, (PlanState.PAUSED,)),
    "cancel": (PlanState.CANCELLED, (PlanState.RUNNING, PlanState.PAUSED)),
}


def read(body: dict[str, Any], settings: Settings) -> RolloutsConfig:
    """A policy's own, which takes no more of an engine than the deployment lets it. Raises BadRequest, which names the
    first field that is wrong."""
    try:
        config = RolloutsConfig.model_validate_json(orjson.dumps(body), strict=True)
    except ValidationError as error:
        raise validation_error(error) from error
    if config.verifiers:
        told = "verifiers: only the deployment's own settings may name a function of a module."
        raise BadRequest(told, param="verifiers", code="invalid_value")
    if (name := above(config, settings.rollouts)) is not None:
        told = f"{name}: more than ATTUNE_ROLLOUTS allows a policy."
        raise BadRequest(told, param=name, code="invalid_value")
    return config


async def create(
    session: AsyncSession, policy: Policy, asked: PlanRequest, settings: Settings, *, actor: str
) -> RolloutPlan:
    """Raises BadRequest, NotFound, Conflict."""
    dataset = await _dataset(session, policy.project_id, asked.dataset)
    await _check_verifier(session, asked.verifier, dataset, settings)
    if not (await session.get_one(Project, policy.project_id)).train:
        raise Conflict("The project does not let its turns be learned from.", code="no_consent")
    most = settings.output_token_cap // asked.n
    if asked.max_tokens is not None and asked.max_tokens > most:
        raise BadRequest(
            f"{asked.n} replies may have {most} tokens each at most: together what one request may ask for.",
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
        verifier=asked.verifier.model_dump(mode="json", by_alias=True),
        max_tokens=asked.max_tokens or min(settings.max_output_tokens, most),
        **asked.model_dump(include={"n", "passes", "temperature", "prompts_per_version"}),
    )
    session.add(plan)
    await session.flush()
    record_audit(session, actor, "create plan", plan.id, project_id=policy.project_id, policy=policy.name, n=asked.n)
    enqueue_after_commit(session, "rollout")
    return plan


async def _dataset(session: AsyncSession, project_id: str, named: str) -> Dataset:
    asked = select(Dataset).where(Dataset.project_id == project_id, or_(Dataset.id == named, Dataset.name == named))
    dataset = await session.scalar(asked.limit(1))
    if dataset is None:
        raise NotFound(f"There is no dataset '{named}'.", param="dataset")
    if dataset.kind != DatasetKind.PROMPTS:
        told = f"Dataset '{dataset.name}' holds {dataset.kind}; a plan asks prompts."
        raise BadRequest(told, param="dataset", code="invalid_value")
    return dataset


async def _check_verifier(
    session: AsyncSession, verifier: VerifierConfig, dataset: Dataset, settings: Settings
) -> None:
    if isinstance(verifier, Custom):
        known = extensions.names(verifiers.ENTRY_POINTS, settings.rollouts.verifiers)
        if verifier.name not in known:
            told = f"verifier.name: known verifiers are {', '.join(known) or 'none'}."
            raise BadRequest(told, param="verifier.name", code="invalid_value")
    if needs_reference(verifier):
        first = await session.get(DatasetRow, (dataset.id, 0))
        if first is None or not first.content.get("reference"):
            told = f"The verifier '{verifier.type}' needs a column 'reference', and '{dataset.name}' has none."
            raise BadRequest(told, param="verifier", code="invalid_value")


def needs_reference(verifier: VerifierConfig) -> bool:
    if isinstance(verifier, Regex):
        return verifier.pattern is None
    if isinstance(verifier, JsonSchema):
        return verifier.schema_ is None
    return isinstance(verifier, Exact | Contains | Number | Choice)


async def step(
    session: AsyncSession, policy: Policy, plan: RolloutPlan, verb: str, *, actor: str, reason: str | None
) -> None:
    """Pause, resume or cancel a plan whose row is locked; what it is already in is no error. Raises Conflict."""
    state, before = STEPS[verb]
    if plan.state == state:
        return
    if plan.state not in before:
        raise Conflict(f"Plan '{plan.id}' is {plan.state}: there is nothing to {verb}.", code="plan_ended")
    values: dict[str, Any] = {"state": state, "reason": reason}
    if state in ENDED:
        values["settled_at"] = now()
    await session.execute(
        update(RolloutPlan)
        .where(RolloutPlan.id == plan.id)
        .values(**values)
        .execution_options(synchronize_session=False)
    )
    await session.refresh(plan)
    record_audit(session, actor, f"{verb} plan", plan.id, reason, project_id=plan.project_id, policy=policy.name)
    enqueue_after_commit(session, "rollout")
