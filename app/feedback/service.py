"""Take feedback once: the row and its idempotency key are one insert in one transaction."""

import hashlib

import orjson
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from app.errors import BadRequest, NotFound, Unprocessable
from app.feedback import repository
from app.feedback.schemas import FeedbackRequest
from app.jobs import nudge
from app.models import Feedback, new_id


async def submit(
    session: AsyncSession, project_id: str, request: FeedbackRequest, header_key: str | None
) -> tuple[Feedback, bool]:
    """The row, and whether it was there before (a replay)."""
    key, fingerprint = _key(request, header_key), _fingerprint(request)
    if (known := await repository.with_key(session, project_id, key)) is not None:
        return _replay(known, fingerprint), True
    turn = await repository.turn_of(session, project_id, request.completion_id)
    if turn is None:
        raise NotFound(f"There is no completion '{request.completion_id}'.", param="completion_id")
    row = Feedback(
        id=new_id("fb"),
        project_id=project_id,
        turn_id=turn.id,
        target=turn.id,
        kind=request.kind,
        name=request.name,
        value=request.number(),
        comment=request.comment,
        source_kind=request.source.kind,
        source_id=request.source.id,
        details=request.metadata,
        idempotency_key=key,
        fingerprint=fingerprint,
    )
    try:
        async with session.begin_nested():
            session.add(row)
    except IntegrityError:  # the same key in flight on another connection, which has won
        known = await repository.with_key(session, project_id, key)
        assert known is not None, f"feedback {key} collides with nothing"
        return _replay(known, fingerprint), True
    nudge(session, "curate")
    return row, False


def _key(request: FeedbackRequest, header_key: str | None) -> str:
    if header_key is not None and not 1 <= len(header_key) <= 250:
        raise BadRequest("An Idempotency-Key holds 1 to 250 characters.", param="Idempotency-Key")
    if request.id is not None and header_key is not None and request.id != header_key:
        raise BadRequest("'id' and the Idempotency-Key header name different keys.", param="id")
    return request.id or header_key or new_id("auto")


def _fingerprint(request: FeedbackRequest) -> str:
    body = request.model_dump(mode="json", exclude={"id"})
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _replay(known: Feedback, fingerprint: str) -> Feedback:
    if known.fingerprint != fingerprint:
        raise Unprocessable("This id was used before with another body.", code="idempotency_key_reused", param="id")
    return known
