"""Submit feedback, singly or in batches, and withdraw it."""

from collections.abc import Iterable, Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.errors import AttuneError, BadRequest, Forbidden
from app.core.jobs import enqueue_after_commit
from app.feedback import browser_tokens, repository
from app.feedback.browser_tokens import TokenClaims
from app.feedback.feedback_rows import BatchResultBody, FeedbackBody
from app.feedback.feedback_writer import FeedbackWriter, Submission, SubmissionResult, build_submission
from app.feedback.keyed_feedback import (
    KeyState,
    not_later_than_now,
    raise_if_superseded,
    read_states,
    withdrawal_of,
    write_states,
)
from app.feedback.kinds import FeedbackCreate, parse_feedback
from app.feedback.queries import get_feedback, read_views
from app.feedback.schemas import ConversationTarget, EpisodeTarget, MetadataTarget
from app.feedback.target_queries import find_newest_turns, find_numbered_turns
from app.models import VOTE_KINDS, AuditAction, Feedback, SourceKind, Turn, new_id, record_audit
from app.projects.auth import Caller
from app.projects.scopes import PROGRAMS_SCOPE


async def submit(
    db: Database,
    writer: FeedbackWriter,
    submitter: Caller | TokenClaims,
    body: dict[str, object],
    *,
    header_key: str | None,
) -> SubmissionResult:
    """Validate and record one piece of feedback; return when it is committed.

    Raises BadRequest, NotFound for an unknown target, Forbidden for what the browser's token or the key does not allow,
    Conflict for a source that has given too much feedback about the target, and Unprocessable for a reused key with
    another body.
    """
    request = parse_feedback(body)
    token = submitter if isinstance(submitter, TokenClaims) else None
    if isinstance(submitter, TokenClaims):
        if request.key is not None:
            raise Forbidden("A browser token does not allow a 'key'; use 'id'.", code="token_scope", param="key")
        request = browser_tokens.restrict_to_claims(submitter, request)
    else:
        _require_source_scope(submitter, request)
    submission = build_submission(submitter.project_id, request, body, header_key=header_key, token=token)
    await _resolve_targets(db, submitter.project_id, [submission])
    if isinstance(submitter, Caller) and submitter.episode_id is not None:
        own = await _find_own_completions(db, submitter.project_id, submitter.episode_id, [submission])
        _require_own_target(submitter.episode_id, submission, own)
    return await writer.submit(submission)


async def _find_own_completions(
    db: Database, project_id: str, episode_id: str, submissions: Iterable[Submission]
) -> set[str]:
    """Return those completions that the submissions are about which belong to the episode."""
    ids = {choice.completion_id for submission in submissions for choice in submission.choices()}
    in_episode = (Turn.project_id == project_id, Turn.completion_id.in_(ids), Turn.episode_id == episode_id)
    async with db.read() as session:
        return set(await session.scalars(select(Turn.completion_id).where(*in_episode).distinct()))


def _require_own_target(episode_id: str, submission: Submission, own_completions: set[str]) -> None:
    """Raise Forbidden for feedback with the key of an episode that is not on this episode or on replies in it."""
    if submission.request.key is not None:  # it could replace what others have said about other replies
        raise Forbidden("The key of an episode does not allow a 'key'; use 'id'.", param="key", code="episode_key")
    target = submission.target
    ids = {choice.completion_id for choice in submission.choices()}
    is_own = target.episode_id == episode_id if isinstance(target, EpisodeTarget) else bool(ids)
    if not is_own or not ids <= own_completions:
        message = f"The key of the episode '{episode_id}' gives feedback on this episode and on replies in it."
        raise Forbidden(message, param="target", code="episode_key")


def _require_source_scope(caller: Caller, request: FeedbackCreate) -> None:
    """Raise Forbidden for feedback of a program or a judge if the key may submit that of people only."""
    if request.source.kind != SourceKind.HUMAN and PROGRAMS_SCOPE not in caller.scopes:
        message = (
            f"Feedback with the source kind {request.source.kind} needs the scope '{PROGRAMS_SCOPE}', "
            "which this API key lacks; create a key with it."
        )
        raise Forbidden(message, param="source.kind")


async def submit_batch(
    db: Database, writer: FeedbackWriter, caller: Caller, bodies: Sequence[object], header_key: str | None
) -> list[BatchResultBody]:
    """Record many pieces of feedback. Returns one result for each, in order; all are committed.

    An invalid item gets an error as its result and does not affect the others. Nor does one about a turn that another
    transaction has locked; without such, they share one transaction.
    """
    outcomes: dict[int, SubmissionResult | AttuneError] = {}
    submissions: dict[int, Submission] = {}
    for index, body in enumerate(bodies):
        try:
            submissions[index] = _parse_item(caller, body, header_key, index)
        except (BadRequest, Forbidden) as error:
            outcomes[index] = error
    await _resolve_targets(db, caller.project_id, list(submissions.values()))
    if caller.episode_id is not None:
        own = await _find_own_completions(db, caller.project_id, caller.episode_id, submissions.values())
        for index, submission in list(submissions.items()):
            try:
                _require_own_target(caller.episode_id, submission, own)
            except Forbidden as error:
                outcomes[index] = error
                del submissions[index]
    items = list(submissions.values())
    if items:
        outcomes |= zip(submissions, await writer.submit_together(items), strict=True)
    return [_item_result(index, outcomes[index]) for index in range(len(bodies))]


def _parse_item(caller: Caller, body: object, header_key: str | None, index: int) -> Submission:
    """Return the submission of an item. Without an `id` its key is, for example, "nightly/7"."""
    if not isinstance(body, dict):
        raise BadRequest("An item must be a JSON object.", code="invalid_value")
    request = parse_feedback(body)
    item_key = None if header_key is None or request.id is not None else f"{header_key}/{index}"
    _require_source_scope(caller, request)
    return build_submission(caller.project_id, request, body, header_key=item_key)


def _item_result(index: int, outcome: SubmissionResult | AttuneError) -> BatchResultBody:
    if isinstance(outcome, AttuneError):
        return {"index": index, "status": outcome.status, "error": outcome.body()["error"]}
    return {"index": index, "status": 200 if outcome.is_replay else 201, "feedback": outcome.view}


async def _resolve_targets(db: Database, project_id: str, submissions: list[Submission]) -> None:
    """Replace each target that metadata or a turn's number names by the turn that they lead to, or None.

    This runs before the write transaction, so that a broad query delays no other writer.
    """
    by_metadata = [(item, item.target.metadata) for item in submissions if isinstance(item.target, MetadataTarget)]
    by_number = [
        (item, item.target)
        for item in submissions
        if isinstance(item.target, ConversationTarget) and item.target.turn is not None
    ]
    if not by_metadata and not by_number:
        return
    async with db.read() as session:
        newest = await find_newest_turns(session, project_id, [metadata for _, metadata in by_metadata])
        numbered = await find_numbered_turns(session, project_id, [target for _, target in by_number])
    named = [item for item, _ in by_metadata] + [item for item, _ in by_number]
    for submission, turn in zip(named, [*newest, *numbered], strict=True):
        submission.target = turn


async def withdraw_by_key(
    session: AsyncSession, project_id: str, key: str, sent_at: float | None, *, actor: str
) -> FeedbackBody | None:
    """Withdraw the feedback of a sender's key and return its view; None if there is none.

    With `sent_at` the key is remembered all the same: feedback that was sent earlier and arrives later does not count.
    Raises Conflict if a later change of the key is known.
    """
    connection = await session.connection()
    states = await connection.run_sync(read_states, {(project_id, key)})
    state = states.get((project_id, key), KeyState(None, 0, None, is_withdrawn=False))
    raise_if_superseded(state, sent_at)
    if sent_at is not None:
        state.sent_at = not_later_than_now(sent_at)
        await connection.run_sync(write_states, {(project_id, key): state})
    if state.feedback is None:
        return None
    return await withdraw(session, project_id, state.feedback["id"], actor=actor)


async def withdraw(session: AsyncSession, project_id: str, feedback_id: str, *, actor: str) -> FeedbackBody:
    """Withdraw feedback by a new row and return its view. Feedback that is no longer effective stays as it is."""
    await (await session.connection()).run_sync(repository.lock_projects, [project_id])
    row = await get_feedback(session, project_id, feedback_id)
    [view] = await read_views(session, project_id, [row])
    if not view["effective"]:
        return view
    session.add(Feedback(**withdrawal_of(row, idempotency_key=new_id("auto"))))
    record_audit(session, actor, AuditAction.FEEDBACK_WITHDRAWN, feedback_id, project_id=project_id)
    if row["kind"] in VOTE_KINDS:
        enqueue_after_commit(session, "curate")
    await session.flush()
    [view] = await read_views(session, project_id, [row])
    return view
