"""Shapes of the API's JSON. A newer server may send more fields than these."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

SourceKind = Literal["HUMAN", "LLM_JUDGE", "CODE"]
FeedbackBody = dict[str, Any]  # one piece of feedback, as it is sent


class Source(TypedDict, total=False):
    """Who or what gives feedback."""

    kind: SourceKind
    id: str | None


class FeedbackFields(TypedDict, total=False):
    """The fields that all kinds of feedback share.

    `id` makes a retry safe, also one of another process; without it the client makes one. `source` is the id of a
    person, or a Source. With `key` instead of `id`, later content under the same key replaces this; `sent_at`, in
    seconds since the epoch, orders such changes, and is now unless it is given.
    """

    id: str
    key: str
    sent_at: float
    name: str
    comment: str
    source: Source | str
    metadata: Mapping[str, str]


class FeedbackRecord(TypedDict, total=False):
    """Feedback as it is stored. `value` is the feedback as a number, `raw_value` the value as sent.

    The answer to a submission has `trainable` and `exclusion_reason`; reads have `effective`, `withdrawn`, `outcome`.
    The answer to a submission that is sent again has `effective` and `withdrawn`, too: it counts only if effective.
    """

    object: str
    id: str
    completion_id: str | None
    choice_index: int | None
    conversation_id: str | None
    episode_id: str | None
    kind: str
    value: float | None
    raw_value: Any
    name: str
    comment: str | None
    source: Source
    metadata: dict[str, Any]
    created_at: float
    trainable: bool | None
    exclusion_reason: str | None
    effective: bool | None
    withdrawn: bool | None
    outcome: dict[str, Any] | None


class BatchResult(TypedDict, total=False):
    """The result of one item of a batch: `status` 201 or, for a repeated id, 200, else `error`.

    After a 200, `feedback` says whether it is still `effective`, or was `withdrawn`.
    """

    index: int
    status: int
    feedback: FeedbackRecord
    error: dict[str, Any]


class FeedbackPage(TypedDict, total=False):
    """A page of feedback. `last_id` is the `after` of the next page."""

    data: list[FeedbackRecord]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FeedbackToken(TypedDict, total=False):
    """A token with which a web page submits feedback on one reply. `url` is where to send it."""

    token: str
    expires_at: int
    url: str


class WebhookEvent(TypedDict, total=False):
    """A verified event. `data` has the project, the actor, the subject and details."""

    type: str
    timestamp: str
    data: dict[str, Any]
