"""Lineage: /v1/policies/{name}/versions/{number}/lineage, and the way back from a completion or a word."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.stored import CompletionId
from app.core.errors import DOCUMENTED, NotFound
from app.core.services import settings_of
from app.feedback.endpoints import FeedbackId
from app.models import Policy, Version
from app.policies import repository as policies
from app.policies import service, taint
from app.policies.endpoints import PolicyName
from app.privacy.lineage import repository, schemas
from app.privacy.lineage.schemas import LearnerList, LineagePage
from app.projects.auth import AdminCaller, DatabaseDep
from app.training.reward_models import repository as reward_models

router = APIRouter(prefix="/v1", tags=["lineage"], responses=DOCUMENTED)
Number = Annotated[int, Path(ge=0, le=999_999_999)]


@router.get("/policies/{name}/versions/{number}/lineage")
async def version_lineage(
    name: PolicyName,
    number: Number,
    request: Request,
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(min_length=1, max_length=128, description="an entry's id")] = None,
) -> LineagePage:
    """Which feedback taught this version: what counted when its batch was frozen, by turn."""
    async with db.read() as session:
        policy = await service.named(session, caller.project_id, name)
        version = await _version(session, policy, number)
        kinds = await repository.teaching(session, caller.project_id, settings_of(request))
        asked = repository.taught(version.batch_id or "", kinds, schemas.cursor(after), limit + 1)
        rows = [tuple(row) for row in await session.execute(asked)]
        versions = await policies.versions_of(session, policy.id)
    stained = taint.stains(versions)
    back = taint.last_clean(version, versions, stained)
    return schemas.page(
        rows,
        policy.name,
        limit,
        version=service.label(policy, version),
        batch=version.batch_id,
        erased_at=stained.get(version.id),
        clean=service.label(policy, back) if back else None,
    )


@router.get("/feedback/{feedback_id}/lineage")
async def feedback_lineage(
    request: Request, feedback_id: FeedbackId, caller: AdminCaller, db: DatabaseDep
) -> LearnerList:
    """Which versions have learned from it. One that came too late, or is words alone, taught none."""
    async with db.read() as session:
        row = await repository.word(session, caller.project_id, feedback_id)
        if row is None:
            raise NotFound(f"There is no feedback '{feedback_id}'.", param="feedback_id")
        settings = settings_of(request)
        kinds = await repository.teaching(session, caller.project_id, settings)
        turns = await repository.judged_by(session, [row] if row.kind in kinds else [])
        echoes = await repository.echoes(session, turns, settings)
        direct = await repository.taught_by(session, kinds, [row.seq])
        direct |= await repository.learned_from(session, dict.fromkeys(echoes, row.created_at))
        return LearnerList.of(await repository.learners(session, direct), await reward_models.taught(session, turns))


@router.get("/chat/completions/{completion_id}/lineage")
async def completion_lineage(completion_id: CompletionId, caller: AdminCaller, db: DatabaseDep) -> LearnerList:
    """Which versions have learned from its choices. A deleted one still answers: it has only lost its content."""
    async with db.read() as session:
        ids = await repository.choices(session, caller.project_id, completion_id)
        if not ids:
            raise NotFound(f"There is no completion '{completion_id}'.", param="completion_id")
        spoken = dict.fromkeys(ids, 0.0)
        direct = await repository.learned_from(session, spoken)
        return LearnerList.of(await repository.learners(session, direct), await reward_models.taught(session, spoken))


async def _version(session: AsyncSession, policy: Policy, number: int) -> Version:
    version = await policies.version_numbered(session, policy.id, number)
    if version is None:
        raise NotFound(f"Policy '{policy.name}' has no version 'v{number}'.", code="model_not_found", param="number")
    return version
