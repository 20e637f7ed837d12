"""Rows of the table of feedback as dicts, and their views: no object of a model is made for an acknowledgement."""

from typing import Literal, NotRequired, TypedDict, cast

from sqlalchemy import RowMapping

from app.core.errors import ErrorFields


class FeedbackRow(TypedDict):
    """The columns of new feedback. A stored row has all of them but `withdraws`, and the choice of its turn."""

    id: str
    project_id: str
    turn_id: str | None
    conversation_id: str | None
    episode_id: str | None
    target: str
    kind: str
    name: str
    value: float | None
    raw_value: object
    comment: str | None
    source_kind: str
    source_id: str | None
    request_metadata: dict[str, str]
    idempotency_key: str
    fingerprint: str
    token_id: str | None
    processed: bool
    seq: NotRequired[int]
    created_at: NotRequired[float]
    emptied_at: NotRequired[float | None]
    completion_id: NotRequired[str | None]
    choice_index: NotRequired[int | None]


class SourceBody(TypedDict):
    kind: str
    id: str | None


class OutcomeBody(TypedDict):
    """An OutcomeView as a dict."""

    state: str
    waiting_for: str | None
    rule: str | None
    version: str | None
    batch: str | None
    until: float | None
    text_rule: str | None
    sentence: str


class FeedbackBody(TypedDict):
    """A FeedbackView as a dict. What is not required depends on whether it was submitted, sent again or read."""

    object: Literal["feedback"]
    id: str
    completion_id: str | None
    choice_index: int | None
    conversation_id: str | None
    episode_id: str | None
    kind: str
    value: float | None
    raw_value: object
    name: str
    comment: str | None
    source: SourceBody
    metadata: dict[str, str]
    created_at: float
    trainable: NotRequired[bool | None]
    exclusion_reason: NotRequired[str | None]
    effective: NotRequired[bool]
    withdrawn: NotRequired[bool]
    outcome: NotRequired[OutcomeBody]


class BatchResultBody(TypedDict):
    """A BatchResult as a dict."""

    index: int
    status: int
    feedback: NotRequired[FeedbackBody]
    error: NotRequired[ErrorFields]


class FeedbackPageBody(TypedDict):
    """A FeedbackPage as a dict."""

    object: Literal["list"]
    data: list[FeedbackBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


def to_feedback_row(row: RowMapping) -> FeedbackRow:
    """Return the dict of a row that was selected with all columns of feedback."""
    return cast(FeedbackRow, dict(row))


def feedback_view(row: FeedbackRow) -> FeedbackBody:
    """Return the part of a view that the row alone gives. The row must be a stored one."""
    return {
        "object": "feedback",
        "id": row["id"],
        "completion_id": row["completion_id"],
        "choice_index": row["choice_index"],
        "conversation_id": row["conversation_id"],
        "episode_id": row["episode_id"],
        "kind": row["kind"],
        "value": row["value"],
        "raw_value": row["raw_value"],
        "name": row["name"],
        "comment": row["comment"],
        "source": {"kind": row["source_kind"], "id": row["source_id"]},
        "metadata": row["request_metadata"],
        "created_at": row["created_at"],
    }
