"""Endpoints of feedback (/v1/feedback): submit, submit in batches, create browser tokens, read and withdraw."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.responses import Response

from app.core.errors import ERROR_RESPONSES, BadRequest, require_row
from app.core.http import json_body, json_response, services_of, settings_of
from app.core.rate_limits import RateLimiter
from app.core.telemetry import Telemetry
from app.feedback import browser_tokens, queries, repository, service
from app.feedback.browser_tokens import RotationRequest, RotationView, TokenClaims, TokenRequest, TokenView
from app.feedback.feedback_writer import MAX_KEY_LENGTH, FeedbackWriter
from app.feedback.kinds import FeedbackRequest
from app.feedback.schemas import (
    BatchResults,
    CompletionId,
    FeedbackBatch,
    FeedbackId,
    FeedbackPage,
    FeedbackView,
    SenderKey,
)
from app.feedback.token_counts import TokenCounter, TokenRequester
from app.projects.auth import (
    BEARER,
    AdminCaller,
    Caller,
    DatabaseDep,
    FeedbackCaller,
    application_slot,
    authenticate,
    limits_of,
    look_up,
    sent_credential,
)
from app.projects.episode_keys import takes_episode_keys
from app.projects.idempotency import IdempotentRoute
from app.projects.scopes import checks_scope

router = APIRouter(prefix="/v1/feedback", tags=["feedback"], responses=ERROR_RESPONSES)
secret_router = APIRouter(
    prefix="/v1/feedback/tokens", tags=["feedback"], route_class=IdempotentRoute, responses=ERROR_RESPONSES
)

IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=MAX_KEY_LENGTH)]
ConversationId = Annotated[str | None, Query(min_length=1, max_length=255)]


@checks_scope("feedback")
async def authenticate_submitter(
    request: Request, db: DatabaseDep, _: object = BEARER
) -> AsyncIterator[Caller | TokenClaims]:
    """Authenticate an API key or a browser token and apply its rate limits and the project's.

    Each token has limits of its own.
    """
    credential = sent_credential(request)
    if not browser_tokens.is_browser_token(credential):
        caller = await authenticate(request, db, "feedback")
        async with application_slot(request, caller):
            yield caller
        return
    claims = await look_up(request, credential, lambda: browser_tokens.verify_token(db, credential))
    request.state.max_body_bytes = browser_tokens.MAX_BODY_BYTES
    project = claims.project_id, limits_of(request, claims).requests_per_minute
    async with services_of(request).get(RateLimiter).slot(claims.jti, None, None, project) as headers:
        request.state.headers = headers
        yield claims


FeedbackSubmitter = Annotated[Caller | TokenClaims, Depends(authenticate_submitter)]


@router.post(
    "",
    status_code=201,
    response_model=FeedbackView,
    responses={200: {"model": FeedbackView, "description": "a replay: this feedback was recorded before"}},
)
@takes_episode_keys
async def submit_feedback(
    request: Request,
    submitter: FeedbackSubmitter,
    db: DatabaseDep,
    body: Annotated[dict[str, Any], json_body(FeedbackRequest, parse=dict, max_values=1000)],
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Submit feedback. It is committed before the response; a repeated `id` or Idempotency-Key changes nothing."""
    services = services_of(request)
    limit = limits_of(request, submitter).feedback_per_minute
    await services.get(RateLimiter).count_feedback(submitter.project_id, 1, limit)
    result = await service.submit(
        db,
        services.get(FeedbackWriter),
        submitter,
        body,
        header_key=idempotency_key,
    )
    if not result.is_replay:
        services.get(Telemetry).record_feedback(submitter.project_id, result.view["kind"])
    headers = {"idempotent-replayed": "true"} if result.is_replay else {}
    return json_response(result.view, 200 if result.is_replay else 201, headers)


@router.post("/batch", response_model=BatchResults)
@takes_episode_keys
async def submit_feedback_batch(
    request: Request,
    caller: FeedbackCaller,
    db: DatabaseDep,
    body: Annotated[FeedbackBatch, json_body(FeedbackBatch, max_values=100_000)],
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Submit up to 1,000 items; each has its own result. The Idempotency-Key applies to all items without an `id`."""
    limit = limits_of(request, caller).feedback_per_minute
    await services_of(request).get(RateLimiter).count_feedback(caller.project_id, len(body.items), limit)
    writer = services_of(request).get(FeedbackWriter)
    results = await service.submit_batch(db, writer, caller, body.items, idempotency_key)
    for result in results:
        if result["status"] == 201:
            services_of(request).get(Telemetry).record_feedback(caller.project_id, result["feedback"]["kind"])
    return json_response({"object": "list", "data": results})


@router.post("/tokens", status_code=201, response_model=TokenView)
async def create_token(
    request: Request, caller: FeedbackCaller, db: DatabaseDep, body: Annotated[TokenRequest, json_body(TokenRequest)]
) -> TokenView:
    """Create a token that a web page can submit feedback with, instead of an API key."""
    seconds = body.expires_in or settings_of(request).limits.feedback_token_seconds
    turns = await db.run_read(lambda connection: repository.find_turns(connection, {body.completion_id}))
    turn_or_none = turns.get((caller.project_id, body.completion_id, body.choice_index))
    turn = require_row(turn_or_none, f"There is no completion '{body.completion_id}'.", param="completion_id")
    counter = services_of(request).get(TokenCounter)
    secret = await counter.submit(TokenRequester(caller.project_id, caller.key_prefix))
    token, expires_at = browser_tokens.create_token(caller.project_id, caller.key_id, secret, turn.id, body, seconds)
    return TokenView(token=token, expires_at=expires_at, url=f"{request.base_url}v1/feedback")


@secret_router.post("/rotate-secret")
async def rotate_token_secret(
    caller: AdminCaller, db: DatabaseDep, body: Annotated[RotationRequest, json_body(RotationRequest)]
) -> RotationView:
    """Sign new tokens with a new secret. Tokens that exist stay valid until they expire, unless `end_tokens` is set."""
    async with db.write() as session:
        return await browser_tokens.rotate_secret(
            session, caller.project_id, actor=caller.key_prefix, end_tokens=body.end_tokens
        )


@router.get("", response_model=FeedbackPage)
async def list_feedback(
    caller: FeedbackCaller,
    db: DatabaseDep,
    completion_id: Annotated[CompletionId | None, Query()] = None,
    conversation_id: ConversationId = None,
    episode_id: Annotated[str | None, Query(min_length=1, max_length=48)] = None,
    choice_index: Annotated[int | None, Query(ge=0, le=127)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(min_length=1, max_length=48)] = None,
    order: Literal["asc", "desc"] = "asc",
) -> Response:
    """List the feedback about a completion, with its comparisons and rankings, a conversation or an episode."""
    if [completion_id, conversation_id, episode_id].count(None) != 2:
        message = "Give one of 'completion_id', 'conversation_id' and 'episode_id'."
        raise BadRequest(message, param="completion_id")
    async with db.read() as session:
        target = (completion_id, choice_index, conversation_id, episode_id)
        query = await queries.select_feedback(session, caller.project_id, *target)
        page = await queries.list_page(
            session, caller.project_id, query, after=after, limit=limit, newest_first=order == "desc"
        )
    return json_response(page)


@router.get("/{feedback_id}", response_model=FeedbackView)
async def get_feedback(caller: FeedbackCaller, db: DatabaseDep, feedback_id: FeedbackId) -> Response:
    """Return one piece of feedback."""
    async with db.read() as session:
        row = await queries.get_feedback(session, caller.project_id, feedback_id)
        [view] = await queries.read_views(session, caller.project_id, [row])
    return json_response(view)


@router.delete("", response_model=FeedbackView)
async def withdraw_feedback_by_key(
    caller: FeedbackCaller,
    db: DatabaseDep,
    key: Annotated[SenderKey, Query()],
    sent_at: Annotated[float | None, Query(ge=0, lt=1e11)] = None,
) -> Response:
    """Withdraw the feedback that has the sender's `key`.

    With `sent_at`, feedback of this key that was sent earlier and arrives later is refused.
    """
    async with db.write() as session:
        view = await service.withdraw_by_key(session, caller.project_id, key, sent_at, actor=caller.key_prefix)
    return json_response(require_row(view, "There is no feedback with this key.", param="key"))


@router.delete("/{feedback_id}", response_model=FeedbackView)
async def withdraw_feedback(caller: FeedbackCaller, db: DatabaseDep, feedback_id: FeedbackId) -> Response:
    """Withdraw feedback; its record stays. Feedback that was withdrawn or replaced before is not changed."""
    async with db.write() as session:
        view = await service.withdraw(session, caller.project_id, feedback_id, actor=caller.key_prefix)
    return json_response(view)
