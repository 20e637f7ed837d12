"""Lineage of versions, feedback and completions: /v1/…/lineage."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.endpoints import CompletionId
from app.core.errors import ERROR_RESPONSES, NotFound, require_row
from app.core.http import settings_of
from app.core.pagination import Page
from app.core.planner import prefer_indexes
from app.feedback.endpoints import FeedbackId
from app.feedback.outcomes import EffectiveOutcome, read_outcomes
from app.feedback.schemas import WITHDRAWAL, OutcomeView
from app.models import Feedback, SourceKind, Turn
from app.policies import repository as policies
from app.policies.context import PolicyContentDep
from app.policies.references import format_reference, version_name
from app.privacy import lineage
from app.privacy.lineage import TrainedVersionView
from app.projects.auth import DatabaseDep, ViewingCaller
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
    outcome: OutcomeView | None = Field(description="what has become of the feedback; null without any")


class LineagePage(Page[LineageEntry]):
    version: str
    batch: str | None
    tainted_at: float | None = Field(
        description="when data that the version or one of its ancestors learned from was erased"
    )
    untainted_ancestor: str | None = Field(
        description="the version to roll back to if this one learned from erased data"
    )


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
    turn_id, _, feedback_id = (after or "").partition(SEPARATOR)
    async with context.read() as (session, policy):
        row = await policies.find_version(session, policy.id, number)
        message = f"Policy '{policy.name}' has no version 'v{number}'."
        version = require_row(row, message, code="model_not_found", param="number")
        any_tainted = await policies.has_tainted_versions(session, policy.id)
        versions = await policies.list_versions(session, policy.id) if any_tainted else []
        await prefer_indexes(session)
        kinds = await lineage.list_reward_kinds(session, policy.project_id, context.settings)
        query = lineage.select_training_feedback(version.batch_id or "", kinds, (turn_id, feedback_id), limit)
        rows = (await session.execute(query)).all()
        outcomes = await read_outcomes(session, policy.project_id, {row.seq for row in rows if row.seq is not None})
    tainted = policies.tainted_since(versions)
    untainted = policies.last_untainted_ancestor(version, versions, tainted)
    return LineagePage.from_rows(
        [_view_entry(policy.name, row, outcomes.get(row.seq)) for row in rows],
        limit,
        version=version_name(policy, version),
        batch=version.batch_id,
        tainted_at=tainted.get(version.id),
        untainted_ancestor=version_name(policy, untainted) if untainted else None,
    )


def _view_entry(policy: str, row: Any, outcome: EffectiveOutcome | None) -> LineageEntry:
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
        outcome=OutcomeView(**outcome.outcome) if outcome else None,
    )


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
