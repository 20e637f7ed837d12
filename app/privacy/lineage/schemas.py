"""Response bodies of the lineage API."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, Field

from app.core.pagination import first_and_last_id
from app.models import Feedback, Sample, SourceKind, Turn
from app.policies.references import format_reference
from app.privacy.lineage.repository import TrainedVersion
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

    @classmethod
    def of(cls, policy: str, sample: Sample, turn: Turn, number: int, feedback: Feedback | None) -> Self:
        return cls(
            id=f"{turn.id}{SEPARATOR}{feedback.id if feedback else ''}",
            turn_id=turn.id,
            completion_id=turn.completion_id,
            choice_index=turn.choice_index,
            origin=turn.origin,
            reply_version=format_reference(policy, number),
            reward=sample.reward,
            rater=_rater(turn, feedback) if feedback else None,
            feedback_id=feedback.id if feedback else None,
            kind=feedback.kind if feedback else None,
            value=feedback.value if feedback else None,
            feedback_at=feedback.created_at if feedback else None,
            erased=turn.deleted_at is not None,
        )


def _rater(turn: Turn, feedback: Feedback) -> str | None:
    if feedback.source_id is not None:
        return names.feedback_rater(feedback.source_kind, feedback.source_id)
    if turn.end_user is not None and feedback.source_kind == SourceKind.HUMAN:
        return names.end_user_rater(turn.end_user)
    return None


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


class TrainedVersionView(BaseModel):
    object: Literal["trained_version"] = "trained_version"
    version: str
    state: str
    direct: bool = Field(description="through its own batch; else through an ancestor")
    tainted_at: float | None

    @classmethod
    def of(cls, row: TrainedVersion) -> Self:
        return cls(
            version=format_reference(row.policy, row.version.number),
            state=row.version.state,
            direct=row.direct,
            tainted_at=row.version.tainted_at,
        )


class TrainedVersionList(BaseModel):
    """Every version that has learned from it, with the descendants, and every reward model."""

    object: Literal["list"] = "list"
    data: list[TrainedVersionView]
    reward_models: list[str] = Field(description='reward models that were fitted on it, such as "assistant/rm-3"')

    @classmethod
    def of(cls, versions: Sequence[TrainedVersion], reward_models: list[str]) -> Self:
        return cls(data=[TrainedVersionView.of(row) for row in versions], reward_models=reward_models)


def parse_cursor(after: str | None) -> tuple[str, str]:
    """Example: "chatcmpl-1/fb-2" -> ("chatcmpl-1", "fb-2")"""
    turn_id, _, feedback_id = (after or "").partition(SEPARATOR)
    return turn_id, feedback_id


def make_page(rows: Sequence[Any], policy: str, limit: int, **fields: Any) -> LineagePage:
    """Build a page from up to `limit + 1` rows of `select_training_feedback`. `fields` describe the version."""
    data = [LineageEntry.of(policy, *row) for row in rows[:limit]]
    return LineagePage(data=data, **first_and_last_id(data), has_more=len(rows) > limit, **fields)
