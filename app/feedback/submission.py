"""One piece of feedback on its way in: what was said, about what, and under which key."""

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson

from app.core.errors import BadRequest
from app.feedback.kinds import FeedbackCreate, Order, Rating
from app.feedback.schemas import Choice, ConversationTarget, MetadataTarget
from app.models import new_id

LONGEST_KEY = 250  # of the header: the column holds 255, which leaves room for what a batch adds


@dataclass(frozen=True, slots=True)
class Item:
    """`about` is settled: pairs of metadata have become the choice they point at, or None if nothing has them."""

    project_id: str
    request: FeedbackCreate
    said: Any
    about: Choice | ConversationTarget | None
    key: str
    keyed: bool  # the caller chose the key, so that it may have come before
    fingerprint: str


def make(
    project_id: str,
    request: FeedbackCreate,
    body: dict[str, Any],
    *,
    header_key: str | None = None,
    found: Choice | None = None,
    space: str | None = None,
) -> Item:
    """`found` is what a metadata target points at. `space` keeps the keys of browsers apart from all others."""
    key = _key(request, header_key)
    about = request.about()
    return Item(
        project_id,
        request,
        _said(request, body),
        found if isinstance(about, MetadataTarget) else about,
        new_id("auto") if key is None else key if space is None else _apart(space, key),
        key is not None,
        _fingerprint(request, body),
    )


def _key(request: FeedbackCreate, header_key: str | None) -> str | None:
    if header_key is not None and "\x00" in header_key:
        raise BadRequest("An Idempotency-Key cannot hold a NUL character.", param="Idempotency-Key")
    if request.id is not None and header_key is not None and request.id != header_key:
        raise BadRequest("'id' and the Idempotency-Key header name different keys.", param="id")
    return request.id or header_key


def _apart(space: str, key: str) -> str:
    return f"browser:{hashlib.sha256(orjson.dumps([space, key])).hexdigest()}"


def _said(request: FeedbackCreate, body: dict[str, Any]) -> Any:
    """The value as it was sent; with its scale, if one was."""
    if isinstance(request, Rating) and "scale" in body:
        return {"value": body["value"], "scale": body["scale"]}
    return body["value"]


def _fingerprint(request: FeedbackCreate, body: dict[str, Any]) -> str:
    """Of what the body means: a field left at its default, or not there yet when the row was written, adds nothing."""
    about = request.about()
    meaning: dict[str, Any] = {
        "kind": body["kind"],
        "value": body["value"],
        "name": request.name,
        "comment": request.comment,
        "source": {"kind": request.source.kind, "id": request.source.id},
        "metadata": request.metadata,
    }
    if isinstance(about, Choice):
        meaning["completion_id"] = about.completion_id
        if about.choice_index:
            meaning["choice_index"] = about.choice_index
    elif about is not None:
        meaning["target"] = about.model_dump()
    elif isinstance(request, Order):
        meaning["value"] = [[rank, one.completion_id, one.choice_index] for rank, one in request.ranks()]
    if isinstance(request, Rating) and request.scale != (1, 5):
        meaning["scale"] = request.scale
    return hashlib.sha256(orjson.dumps(meaning, option=orjson.OPT_SORT_KEYS)).hexdigest()
