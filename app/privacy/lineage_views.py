"""What a version learned from, as the API and the console show it."""

from typing import Any, Literal

from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import require_row
from app.core.pagination import Page
from app.core.planner import prefer_indexes
from app.core.settings import Settings
from app.feedback.outcomes import EffectiveOutcome, read_outcomes
from app.feedback.schemas import OutcomeView
from app.models import Policy, SourceKind
from app.policies import repository as policies
from app.policies.references import format_reference, version_name
from app.privacy import lineage
from app.raters import names

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


async def view_lineage(
    session: AsyncSession, policy: Policy, number: int, settings: Settings, limit: int, after: str | None = None
) -> LineagePage:
    """Return the feedback that the version learned from, by turn, after the entry with the id `after`.

    It is what was effective when the version's batch was frozen. Raises NotFound.
    """
    turn_id, _, feedback_id = (after or "").partition(SEPARATOR)
    row = await policies.find_version(session, policy.id, number)
    message = f"Policy '{policy.name}' has no version 'v{number}'."
    version = require_row(row, message, code="model_not_found", param="number")
    any_tainted = await policies.has_tainted_versions(session, policy.id)
    versions = await policies.list_versions(session, policy.id) if any_tainted else []
    await prefer_indexes(session)
    kinds = await lineage.list_reward_kinds(session, policy.project_id, settings)
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
