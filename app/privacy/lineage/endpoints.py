"""Lineage of versions, feedback and completions: /v1/…/lineage."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.stored import CompletionId
from app.core.errors import ERROR_RESPONSES, NotFound
from app.core.services import settings_of
from app.feedback.endpoints import FeedbackId
from app.models import Policy, Version
from app.policies import ancestry, service
from app.policies import repository as policies
from app.policies.references import PolicyName, version_name
from app.privacy.lineage import repository, schemas
from app.privacy.lineage.schemas import LineagePage, TrainedVersionList
from app.projects.auth import AdminCaller, DatabaseDep
from app.training.reward_models import repository as reward_models

router = APIRouter(prefix="/v1", tags=["lineage"], responses=ERROR_RESPONSES)
VersionNumber = Annotated[int, Path(ge=0, le=999_999_999)]


@router.get("/policies/{name}/versions/{number}/lineage")
async def version_lineage(
    name: PolicyName,
    number: VersionNumber,
    request: Request,
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(min_length=1, max_length=128, description="an entry's id")] = None,
) -> LineagePage:
    """Return the feedback that the version learned from, by turn: what was effective when its batch was frozen."""
    async with db.read() as session:
        policy = await service.get_policy(session, caller.project_id, name)
        version = await _get_version(session, policy, number)
        kinds = await repository.list_reward_kinds(session, caller.project_id, settings_of(request))
        query = repository.select_training_feedback(version.batch_id or "", kinds, schemas.parse_cursor(after), limit)
        rows = [tuple(row) for row in await session.execute(query)]
        versions = await policies.list_versions(session, policy.id)
    tainted = ancestry.tainted_since(versions)
    untainted = ancestry.last_untainted_ancestor(version, versions, tainted)
    return schemas.make_page(
        rows,
        policy.name,
        limit,
        version=version_name(policy, version),
        batch=version.batch_id,
        tainted_at=tainted.get(version.id),
        untainted_ancestor=version_name(policy, untainted) if untainted else None,
    )


@router.get("/feedback/{feedback_id}/lineage")
async def feedback_lineage(
    request: Request, feedback_id: FeedbackId, caller: AdminCaller, db: DatabaseDep
) -> TrainedVersionList:
    """Return the versions that learned from the feedback: none if it came too late, or is a comment."""
    async with db.read() as session:
        row = await repository.find_feedback(session, caller.project_id, feedback_id)
        if row is None:
            raise NotFound(f"There is no feedback '{feedback_id}'.", param="feedback_id")
        settings = settings_of(request)
        kinds = await repository.list_reward_kinds(session, caller.project_id, settings)
        turns = await repository.find_feedback_turns(session, [row] if row.kind in kinds else [])
        discounted = await repository.find_discounted_turns(session, turns, settings)
        direct = await repository.versions_trained_on_feedback(session, kinds, [row.seq])
        direct |= await repository.versions_trained_on_turns(session, dict.fromkeys(discounted, row.created_at))
        return await _list_learners(session, direct, turns)


@router.get("/chat/completions/{completion_id}/lineage")
async def completion_lineage(completion_id: CompletionId, caller: AdminCaller, db: DatabaseDep) -> TrainedVersionList:
    """Return the versions that learned from the completion's choices, also of a completion that was deleted."""
    async with db.read() as session:
        ids = await repository.find_choices(session, caller.project_id, completion_id)
        if not ids:
            raise NotFound(f"There is no completion '{completion_id}'.", param="completion_id")
        turns = dict.fromkeys(ids, 0.0)
        direct = await repository.versions_trained_on_turns(session, turns)
        return await _list_learners(session, direct, turns)


async def _list_learners(session: AsyncSession, direct: set[str], turns: dict[str, float]) -> TrainedVersionList:
    return TrainedVersionList.of(
        await repository.list_trained_versions(session, direct), await reward_models.names_fitted_on(session, turns)
    )


async def _get_version(session: AsyncSession, policy: Policy, number: int) -> Version:
    version = await policies.find_version(session, policy.id, number)
    if version is None:
        raise NotFound(f"Policy '{policy.name}' has no version 'v{number}'.", code="model_not_found", param="number")
    return version
