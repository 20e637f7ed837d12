"""Submit feedback, singly or in batches, and withdraw it."""

import hashlib
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.errors import AttuneError, BadRequest
from app.core.jobs import enqueue_after_commit
from app.feedback import browser_tokens, queries, repository
from app.feedback.browser_tokens import TokenClaims
from app.feedback.feedback_writer import FeedbackWriter, SubmissionResult, submit_many
from app.feedback.kinds import FeedbackCreate, parse_feedback
from app.feedback.schemas import WITHDRAWAL, Choice, MetadataTarget
from app.feedback.submission import build_submission
from app.models import NUMERIC_KINDS, RANKING_KINDS, Feedback, new_id

COPIED_COLUMNS = ("project_id", "turn_id", "conversation_id", "target", "name", "source_kind", "source_id")


async def submit(
    db: Database,
    writer: FeedbackWriter,
    project_id: str,
    body: dict[str, Any],
    *,
    header_key: str | None,
    token_claims: TokenClaims | None = None,
) -> SubmissionResult:
    """Validate and record one piece of feedback; return when it is committed.

    Raises BadRequest, NotFound for an unknown target, Forbidden for what the browser's token does not allow, and
    Unprocessable for a reused key with another body.
    """
    request = parse_feedback(body)
    if token_claims is not None:
        request = browser_tokens.restrict_to_claims(token_claims, request)
    [metadata_match] = await _resolve_metadata_targets(db, project_id, [request])
    submission = build_submission(
        project_id,
        request,
        body,
        header_key=header_key,
        metadata_match=metadata_match,
        key_namespace=token_claims.key_namespace if token_claims else None,
    )
    return await writer.submit(submission)


async def submit_batch(
    db: Database, project_id: str, bodies: list[Any], header_key: str | None
) -> list[dict[str, Any]]:
    """Record many pieces of feedback in one transaction. Returns one result for each, in order; all are committed.

    An invalid item gets an error as its result and does not affect the others.
    """
    outcomes: dict[int, SubmissionResult | AttuneError] = {}
    requests: dict[int, FeedbackCreate] = {}
    for index, body in enumerate(bodies):
        try:
            requests[index] = _parse_item(body)
        except BadRequest as error:
            outcomes[index] = error
    matches = dict(zip(requests, await _resolve_metadata_targets(db, project_id, list(requests.values())), strict=True))
    submissions = {
        index: build_submission(
            project_id,
            request,
            bodies[index],
            header_key=_item_key(request, header_key, index),
            metadata_match=matches[index],
        )
        for index, request in requests.items()
    }
    if submissions:
        results = await db.run_write(lambda connection: submit_many(connection, list(submissions.values())))
        outcomes |= zip(submissions, results, strict=True)
    return [_item_result(index, outcomes[index]) for index in range(len(bodies))]


def _parse_item(body: Any) -> FeedbackCreate:
    if not isinstance(body, dict):
        raise BadRequest("An item must be a JSON object.", code="invalid_value")
    return parse_feedback(body)


def _item_key(request: FeedbackCreate, header_key: str | None, index: int) -> str | None:
    """Return the key of an item without an `id`. Example: ("nightly", 7) -> "nightly/7"."""
    return None if header_key is None or request.id is not None else f"{header_key}/{index}"


def _item_result(index: int, outcome: SubmissionResult | AttuneError) -> dict[str, Any]:
    if isinstance(outcome, AttuneError):
        return {"index": index, "status": outcome.status, **outcome.body()}
    return {"index": index, "status": 200 if outcome.is_replay else 201, "feedback": outcome.view}


async def _resolve_metadata_targets(
    db: Database, project_id: str, requests: list[FeedbackCreate]
) -> list[Choice | None]:
    """Return the turn that each request's metadata leads to; None for a request that names its target itself."""
    metadata_by_index = {
        index: target.metadata
        for index, request in enumerate(requests)
        if isinstance(target := request.get_target(), MetadataTarget)
    }
    if not metadata_by_index:
        return [None] * len(requests)
    async with db.read() as session:
        turns = await repository.find_newest_turns(session, project_id, list(metadata_by_index.values()))
    turn_by_index = dict(zip(metadata_by_index, turns, strict=True))
    return [turn_by_index.get(index) for index in range(len(requests))]


async def withdraw(session: AsyncSession, project_id: str, feedback_id: str) -> dict[str, Any]:
    """Withdraw feedback by a new row and return its view. Feedback that is no longer effective stays as it is."""
    await (await session.connection()).run_sync(repository.lock_projects, [project_id])
    row = await queries.get_feedback(session, project_id, feedback_id)
    [view] = await queries.to_views(session, project_id, [row])
    if not view["effective"]:
        return view
    affects_reward = row["kind"] in (*NUMERIC_KINDS, *RANKING_KINDS)
    session.add(_withdrawal(row, processed=not affects_reward))
    if affects_reward:
        enqueue_after_commit(session, "curate")
    return view | {"effective": False, "withdrawn": True}


def _withdrawal(row: queries.Row, *, processed: bool) -> Feedback:
    return Feedback(
        id=new_id("fb"),
        kind=WITHDRAWAL,
        request_metadata={"withdraws": row["id"]},
        idempotency_key=new_id("auto"),
        fingerprint=hashlib.sha256(row["id"].encode()).hexdigest(),
        processed=processed,
        **{column: row[column] for column in COPIED_COLUMNS},
    )
