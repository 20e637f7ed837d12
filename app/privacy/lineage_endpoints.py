"""Lineage of versions, feedback and completions: /v1/…/lineage."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.stored import CompletionId
from app.core.errors import ERROR_RESPONSES, NotFound, require_row
from app.core.http import settings_of
from app.core.pagination import first_and_last_id
from app.feedback.endpoints import FeedbackId
from app.feedback.schemas import WITHDRAWAL
from app.models import Feedback, SourceKind, Turn
from app.policies import repository as policies
from app.policies import service
from app.policies.references import PolicyName, format_reference, version_name
from app.privacy import lineage
from app.privacy.lineage import TrainedVersionView
from app.projects.auth import AdminCaller, DatabaseDep
from app.raters import names
from app.training import reward_models

router = APIRouter(prefix="/v1", tags=["lineage"], responses=ERROR_RESPONSES)
VersionNumber = Annotated[int, Path(ge=0, le=999_999_999)]
SEPARATOR = "/"


class LineageEntry(BaseModel):
    """A feedback that a version learned from, or a sample without any. Its id is the `after` of the next page."""

    object: Literal["lineage.entry"] = "lineage.entry"
    id: str
    turn_id: str
    completion_id: str
    choice_index: int
    origin: Literal["chat", "group_sample", "prompt_set"] = Field(
        description="a chat, or a rollout on a chat's prompt or on a dataset's"
    )
    reply_version: str = Field(description="the version that gave the reply")
    reward: float = Field(description="the reward of the sample, from all reward sources")
    rater: str | None = Field(description="who gave the feedback; null without a name, and without feedback")
    feedback_id: str | None
    kind: str | None
    value: float | None
    feedback_at: float | None
    erased: bool = Field(description="whether the turn's content has been erased since")


class LineagePage(BaseModel):
    object: Literal["list"] = "list"
    version: str
    batch: str | None
    tainted_at: float | None = Field(
        description="when data that the version or one of its ancestors learned from was erased"
    )
    untainted_ancestor: str | None = Field(
        description="the version to roll back to if this one learned from erased data"
    )
    data: list[LineageEntry]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TrainedVersionList(BaseModel):
    """Every version that has learned from it, with the descendants, and every reward model."""

    object: Literal["list"] = "list"
    data: list[TrainedVersionView]
    reward_models: list[str] = Field(description='reward models that were fitted on it, such as "assistant/rm-3"')


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
    turn_id, _, feedback_id = (after or "").partition(SEPARATOR)
    async with db.read() as session:
        policy = await service.get_policy(session, caller.project_id, name)
        versions = await policies.list_versions(session, policy.id)
        row = next((version for version in versions if version.number == number), None)
        message = f"Policy '{name}' has no version 'v{number}'."
        version = require_row(row, message, code="model_not_found", param="number")
        kinds = await lineage.list_reward_kinds(session, caller.project_id, settings_of(request))
        query = lineage.select_training_feedback(version.batch_id or "", kinds, (turn_id, feedback_id), limit)
        rows = (await session.execute(query)).all()
    tainted = policies.tainted_since(versions)
    untainted = policies.last_untainted_ancestor(version, versions, tainted)
    entries = [_view_entry(name, row) for row in rows[:limit]]
    return LineagePage(
        version=version_name(policy, version),
        batch=version.batch_id,
        tainted_at=tainted.get(version.id),
        untainted_ancestor=version_name(policy, untainted) if untainted else None,
        data=entries,
        **first_and_last_id(entries),
        has_more=len(rows) > limit,
    )


def _view_entry(policy: str, row: Any) -> LineageEntry:
    rater = None
    if row.source_id is not None:
        rater = names.feedback_rater(row.source_kind, row.source_id)
    elif row.source_kind == SourceKind.HUMAN and row.end_user is not None:
        rater = names.end_user_rater(row.end_user)
    return LineageEntry(
        **row._mapping,
        id=f"{row.turn_id}{SEPARATOR}{row.feedback_id or ''}",
        reply_version=format_reference(policy, row.number),
        rater=rater,
        erased=row.deleted_at is not None,
    )


@router.get("/feedback/{feedback_id}/lineage")
async def feedback_lineage(
    request: Request, feedback_id: FeedbackId, caller: AdminCaller, db: DatabaseDep
) -> TrainedVersionList:
    """Return the versions that learned from the feedback: none if it came too late, or is a comment."""
    in_project = select(Feedback).where(Feedback.id == feedback_id, Feedback.project_id == caller.project_id)
    async with db.read() as session:
        row_or_none = await session.scalar(in_project.where(Feedback.kind != WITHDRAWAL))
        row = require_row(row_or_none, f"There is no feedback '{feedback_id}'.", param="feedback_id")
        settings = settings_of(request)
        kinds = await lineage.list_reward_kinds(session, caller.project_id, settings)
        turns = await lineage.find_feedback_turns(session, [row.seq] if row.kind in kinds else [])
        discounted = await lineage.find_discounted_turns(session, turns, settings)
        direct = await lineage.versions_trained_on_feedback(session, kinds, [row.seq])
        direct |= await lineage.versions_trained_on_turns(session, dict.fromkeys(discounted, row.created_at))
        return await _list_learners(session, direct, turns)


@router.get("/chat/completions/{completion_id}/lineage")
async def completion_lineage(completion_id: CompletionId, caller: AdminCaller, db: DatabaseDep) -> TrainedVersionList:
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
