"""Lineage of versions, feedback and completions: /v1/…/lineage."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.views import CompletionId
from app.core.errors import ERROR_RESPONSES, NotFound, require_row
from app.core.http import settings_of
from app.core.planner import prefer_indexes
from app.feedback.outcomes import read_outcomes
from app.feedback.schemas import WITHDRAWAL, FeedbackId, OutcomeView
from app.models import Feedback, Turn
from app.policies.context import PolicyContentDep
from app.privacy import lineage
from app.privacy.lineage import TrainedVersionView
from app.privacy.lineage_views import LineagePage, view_lineage
from app.projects.auth import DatabaseDep, ViewingCaller
from app.training import reward_models

router = APIRouter(prefix="/v1", tags=["lineage"], responses=ERROR_RESPONSES)
VersionNumber = Annotated[int, Path(ge=0, le=999_999_999)]


class TrainedVersionList(BaseModel):
    """Every version that has learned from it, with its nearest 500 descendants, and every reward model."""

    object: Literal["list"] = "list"
    data: list[TrainedVersionView]
    reward_models: list[str] = Field(description='reward models that were fitted on it, such as "assistant/rm-3"')


class FeedbackLineage(TrainedVersionList):
    outcome: OutcomeView = Field(description="what has become of the feedback")


@router.get("/policies/{name}/versions/{number}/lineage")
async def version_lineage(
    context: PolicyContentDep,
    number: VersionNumber,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(min_length=1, max_length=128, description="an entry's id")] = None,
) -> LineagePage:
    """Return the feedback that the version learned from, by turn: what was effective when its batch was frozen."""
    async with context.read() as (session, policy):
        return await view_lineage(session, policy, number, context.settings, limit, after)


@router.get("/feedback/{feedback_id}/lineage")
async def feedback_lineage(
    request: Request, feedback_id: FeedbackId, caller: ViewingCaller, db: DatabaseDep
) -> FeedbackLineage:
    """Return the versions that learned from the feedback: none if it came too late, or is a comment."""
    in_project = select(Feedback).where(Feedback.id == feedback_id, Feedback.project_id == caller.project_id)
    async with db.read() as session:
        await prefer_indexes(session)
        row_or_none = await session.scalar(in_project.where(Feedback.kind != WITHDRAWAL))
        row = require_row(row_or_none, f"There is no feedback '{feedback_id}'.", param="feedback_id")
        settings = settings_of(request)
        kinds = await lineage.list_reward_kinds(session, caller.project_id, settings)
        turns = await lineage.find_feedback_turns(session, [row.seq] if row.kind in kinds else [])
        discounted = await lineage.find_discounted_turns(session, turns, settings)
        direct = await lineage.versions_trained_on_feedback(session, kinds, [row.seq])
        direct |= await lineage.versions_trained_on_turns(session, dict.fromkeys(discounted, row.created_at))
        learners = await _list_learners(session, direct, turns)
        outcomes = await read_outcomes(session, caller.project_id, [row.seq])
    return FeedbackLineage(**dict(learners), outcome=OutcomeView(**outcomes[row.seq].outcome))


@router.get("/chat/completions/{completion_id}/lineage")
async def completion_lineage(completion_id: CompletionId, caller: ViewingCaller, db: DatabaseDep) -> TrainedVersionList:
    """Return the versions that learned from the completion's choices, also of a completion that was deleted."""
    choices = select(Turn.id).where(Turn.completion_id == completion_id, Turn.project_id == caller.project_id)
    async with db.read() as session:
        turns = dict.fromkeys(await session.scalars(choices), 0.0)
        if not turns:
            raise NotFound(f"There is no completion '{completion_id}'.", param="completion_id")
        direct = await lineage.versions_trained_on_turns(session, turns)
        return await _list_learners(session, direct, turns)


async def _list_learners(session: AsyncSession, direct: set[str], turns: dict[str, float]) -> TrainedVersionList:
    return TrainedVersionList(
        data=await lineage.list_trained_versions(session, direct),
        reward_models=await reward_models.names_fitted_on(session, turns),
    )
