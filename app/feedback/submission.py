"""One submitted piece of feedback: its request, its target and its idempotency key."""

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson

from app.core.errors import BadRequest
from app.feedback.kinds import FeedbackCreate, OrderedFeedback, Rating
from app.feedback.schemas import Choice, ConversationTarget, MetadataTarget
from app.models import new_id

MAX_KEY_LENGTH = 250  # of the header; the column holds 255 characters, and a batch appends an index


@dataclass(frozen=True, slots=True)
class Submission:
    """Feedback that is ready to be written.

    `target` is resolved: a metadata target has become the turn that matches, or None if there is none.
    """

    project_id: str
    request: FeedbackCreate
    raw_value: Any
    target: Choice | ConversationTarget | None
    key: str
    has_client_key: bool  # the client chose the key, so the submission may be a replay
    fingerprint: str  # SHA-256 of the meaning of the body


def build_submission(
    project_id: str,
    request: FeedbackCreate,
    body: dict[str, Any],
    *,
    header_key: str | None = None,
    metadata_match: Choice | None = None,
    key_namespace: str | None = None,
) -> Submission:
    """Return the submission for a validated request. Raises BadRequest for contradictory keys.

    Args:
        header_key: The Idempotency-Key header.
        metadata_match: The turn that a metadata target matches.
        key_namespace: Separates the keys of one browser from all others.
    """
    client_key = _client_key(request, header_key)
    if client_key is None:
        key = new_id("auto")
    else:
        key = client_key if key_namespace is None else _namespaced_key(key_namespace, client_key)
    target = request.get_target()
    return Submission(
        project_id=project_id,
        request=request,
        raw_value=_raw_value(request, body),
        target=metadata_match if isinstance(target, MetadataTarget) else target,
        key=key,
        has_client_key=client_key is not None,
        fingerprint=_fingerprint(request, body),
    )


def _client_key(request: FeedbackCreate, header_key: str | None) -> str | None:
    if header_key is not None and "\x00" in header_key:
        raise BadRequest("An Idempotency-Key cannot hold a NUL character.", param="Idempotency-Key")
    if request.id is not None and header_key is not None and request.id != header_key:
        raise BadRequest("'id' and the Idempotency-Key header name different keys.", param="id")
    return request.id or header_key


def _namespaced_key(namespace: str, key: str) -> str:
    return f"browser:{hashlib.sha256(orjson.dumps([namespace, key])).hexdigest()}"


def _raw_value(request: FeedbackCreate, body: dict[str, Any]) -> Any:
    """Return the value as it was sent, with its scale if one was sent."""
    if isinstance(request, Rating) and "scale" in body:
        return {"value": body["value"], "scale": body["scale"]}
    return body["value"]


def _fingerprint(request: FeedbackCreate, body: dict[str, Any]) -> str:
    """Return a hash of the body's meaning.

    Fields at their defaults do not change it; nor do fields that were added to the API after a row was written.
    """
    target = request.get_target()
    meaning: dict[str, Any] = {
        "kind": body["kind"],
        "value": body["value"],
        "name": request.name,
        "comment": request.comment,
        "source": {"kind": request.source.kind, "id": request.source.id},
        "metadata": request.metadata,
    }
    if isinstance(target, Choice):
        meaning["completion_id"] = target.completion_id
        if target.choice_index:
            meaning["choice_index"] = target.choice_index
    elif target is not None:
        meaning["target"] = target.model_dump()
    elif isinstance(request, OrderedFeedback):
        meaning["value"] = [
            [rank, choice.completion_id, choice.choice_index] for rank, choice in request.ranked_choices()
        ]
    if isinstance(request, Rating) and request.scale != (1, 5):
        meaning["scale"] = request.scale
    return hashlib.sha256(orjson.dumps(meaning, option=orjson.OPT_SORT_KEYS)).hexdigest()
