"""Submit feedback, singly or in batches, and withdraw it."""

import hashlib
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.errors import AttuneError, BadRequest
from app.core.jobs import enqueue_after_commit
from app.feedback import browser_tokens, repository
from app.feedback.browser_tokens import TokenClaims
from app.feedback.feedback_writer import FeedbackWriter, Submission, SubmissionResult, build_submission, submit_many
from app.feedback.kinds import parse_feedback
from app.feedback.queries import get_feedback, read_views
from app.feedback.schemas import WITHDRAWAL, MetadataTarget
from app.models import VOTE_KINDS, AuditAction, Feedback, new_id, record_audit

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
    key_namespace = token_claims.key_namespace if token_claims else None
    submission = build_submission(project_id, request, body, header_key=header_key, key_namespace=key_namespace)
    await _resolve_metadata_targets(db, project_id, [submission])
    return await writer.submit(submission)


async def submit_batch(
    db: Database, project_id: str, bodies: list[Any], header_key: str | None
) -> list[dict[str, Any]]:
    """Record many pieces of feedback in one transaction. Returns one result for each, in order; all are committed.

    An invalid item gets an error as its result and does not affect the others.
    """
    outcomes: dict[int, SubmissionResult | AttuneError] = {}
    submissions: dict[int, Submission] = {}
    for index, body in enumerate(bodies):
        try:
            submissions[index] = _parse_item(project_id, body, header_key, index)
        except BadRequest as error:
            outcomes[index] = error
    items = list(submissions.values())
    await _resolve_metadata_targets(db, project_id, items)
    if items:
        results = await db.run_write(lambda connection: submit_many(connection, items))
        outcomes |= zip(submissions, results, strict=True)
    return [_item_result(index, outcomes[index]) for index in range(len(bodies))]


def _parse_item(project_id: str, body: Any, header_key: str | None, index: int) -> Submission:
    """Return the submission of an item. Without an `id` its key is, for example, "nightly/7"."""
    if not isinstance(body, dict):
        raise BadRequest("An item must be a JSON object.", code="invalid_value")
    request = parse_feedback(body)
    item_key = None if header_key is None or request.id is not None else f"{header_key}/{index}"
    return build_submission(project_id, request, body, header_key=item_key)


def _item_result(index: int, outcome: SubmissionResult | AttuneError) -> dict[str, Any]:
    if isinstance(outcome, AttuneError):
        return {"index": index, "status": outcome.status, **outcome.body()}
    return {"index": index, "status": 200 if outcome.is_replay else 201, "feedback": outcome.view}


async def _resolve_metadata_targets(db: Database, project_id: str, submissions: list[Submission]) -> None:
    """Replace each target that is named by metadata by the turn that the metadata leads to, or None."""
    queries = [(item, item.target.metadata) for item in submissions if isinstance(item.target, MetadataTarget)]
    if not queries:
        return
    async with db.read() as session:
        turns = await repository.find_newest_turns(session, project_id, [metadata for _, metadata in queries])
    for (submission, _), turn in zip(queries, turns, strict=True):
        submission.target = turn


async def withdraw(session: AsyncSession, project_id: str, feedback_id: str, *, actor: str) -> dict[str, Any]:
    """Withdraw feedback by a new row and return its view. Feedback that is no longer effective stays as it is."""
    await (await session.connection()).run_sync(repository.lock_projects, [project_id])
    row = await get_feedback(session, project_id, feedback_id)
    [view] = await read_views(session, project_id, [row])
    if not view["effective"]:
        return view
    affects_reward = row["kind"] in VOTE_KINDS
    session.add(
        Feedback(
            id=new_id("fb"),
            kind=WITHDRAWAL,
            request_metadata={"withdraws": row["id"]},
            idempotency_key=new_id("auto"),
            fingerprint=hashlib.sha256(row["id"].encode()).hexdigest(),
            processed=not affects_reward,
            **{column: row[column] for column in COPIED_COLUMNS},
        )
    )
    record_audit(session, actor, AuditAction.FEEDBACK_WITHDRAWN, feedback_id, project_id=project_id)
    if affects_reward:
        enqueue_after_commit(session, "curate")
    await session.flush()
    [view] = await read_views(session, project_id, [row])
    return view
