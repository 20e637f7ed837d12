"""/v1/feedback: say something about a reply, one by one or in batches, read it back, take it back."""

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Header, Path, Query, Request
from starlette.responses import Response

from app.core.errors import DOCUMENTED, BadRequest, NotFound
from app.core.http import JsonBody, parse_body, request_body_schema
from app.core.services import services_of, settings_of
from app.core.telemetry import Telemetry
from app.feedback import batch, browser_tokens, kinds, queries, repository, submission, withdrawal
from app.feedback.author import FeedbackAuthor
from app.feedback.browser_tokens import TokenRequest, TokenView
from app.feedback.feedback_writer import FeedbackWriter, find
from app.feedback.kinds import FeedbackRequest
from app.feedback.schemas import BatchAnswer, FeedbackBatch, FeedbackPage, FeedbackView
from app.projects.auth import DatabaseDep, FeedbackCaller

router = APIRouter(prefix="/v1/feedback", tags=["feedback"], responses=DOCUMENTED)

IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=submission.LONGEST_KEY)]
FeedbackId = Annotated[str, Path(min_length=1, max_length=48)]
Named = Annotated[str | None, Query(min_length=1, max_length=255)]


@router.post(
    "",
    status_code=201,
    response_model=FeedbackView,
    responses={200: {"model": FeedbackView, "description": "It was there before."}},
    openapi_extra=request_body_schema(FeedbackRequest),
)
async def submit(
    request: Request, author: FeedbackAuthor, db: DatabaseDep, body: JsonBody, idempotency_key: IdempotencyKey = None
) -> Response:
    """Durable before the answer. The same `id` or Idempotency-Key again gives the same answer, and changes nothing."""
    said = kinds.read(body)
    if author.leave is not None:
        said = browser_tokens.within(author.leave, said)
    [found] = await find(db, author.project_id, [said])
    space = author.leave.space if author.leave else None
    receipt = await FeedbackWriter.of(request).submit(
        submission.make(author.project_id, said, body, header_key=idempotency_key, found=found, space=space)
    )
    if not receipt.replayed:
        services_of(request).get(Telemetry).heard(author.project_id, said.kind)
    headers = {"idempotent-replayed": "true"} if receipt.replayed else {}
    return _json(receipt.view, 200 if receipt.replayed else 201, headers)


@router.post("/batch", response_model=BatchAnswer, openapi_extra=request_body_schema(FeedbackBatch))
async def submit_batch(
    request: Request, caller: FeedbackCaller, db: DatabaseDep, body: JsonBody, idempotency_key: IdempotencyKey = None
) -> Response:
    """Up to 1,000 at once, each with a result of its own. An Idempotency-Key stands for all items without an `id`."""
    results = await batch.submit(db, caller.project_id, parse_body(FeedbackBatch, body).items, idempotency_key)
    for result in results:
        if result["status"] == 201:
            services_of(request).get(Telemetry).heard(caller.project_id, result["feedback"]["kind"])
    return _json({"object": "list", "data": results})


@router.post("/tokens", status_code=201, response_model=TokenView, openapi_extra=request_body_schema(TokenRequest))
async def make_token(request: Request, caller: FeedbackCaller, db: DatabaseDep, body: JsonBody) -> TokenView:
    """A token to put into a web page, in place of an API key."""
    wanted = parse_body(TokenRequest, body)
    seconds = wanted.expires_in or settings_of(request).feedback_token_seconds
    choices = await db.run_read(lambda connection: repository.turns(connection, [wanted.completion_id]))
    turn = next((one for one in choices if _is(one, caller.project_id, wanted.choice_index)), None)
    if turn is None:
        raise NotFound(f"There is no completion '{wanted.completion_id}'.", param="completion_id")
    async with db.write() as session:
        secret = await browser_tokens.secret_of(session, caller.project_id)
    token, expires_at = browser_tokens.mint(caller.project_id, secret, turn, wanted, seconds)
    return TokenView(token=token, expires_at=expires_at, url=f"{request.base_url}v1/feedback")


def _is(turn: repository.Found, project_id: str, choice_index: int) -> bool:
    return turn.project_id == project_id and turn.choice_index == choice_index


@router.get("", response_model=FeedbackPage)
async def listed(
    caller: FeedbackCaller,
    db: DatabaseDep,
    completion_id: Named = None,
    conversation_id: Named = None,
    choice_index: Annotated[int | None, Query(ge=0, le=127)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(min_length=1, max_length=48)] = None,
    order: Literal["asc", "desc"] = "asc",
) -> Response:
    """By completion, with the comparisons and rankings it is part of; or by conversation, with all of its turns."""
    if (completion_id is None) == (conversation_id is None):
        raise BadRequest("Give either 'completion_id' or 'conversation_id'.", param="completion_id")
    async with db.read() as session:
        if completion_id is not None:
            said = await queries.of_completion(session, caller.project_id, completion_id, choice_index)
        else:
            said = await queries.of_conversation(session, caller.project_id, conversation_id or "")
        data, has_more = await queries.page(
            session, caller.project_id, said, after=after, limit=limit, newest_first=order == "desc"
        )
    ids = [view["id"] for view in data] or [None]
    page = {"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
    return _json(page)


@router.get("/{feedback_id}", response_model=FeedbackView)
async def one(caller: FeedbackCaller, db: DatabaseDep, feedback_id: FeedbackId) -> Response:
    async with db.read() as session:
        row = await queries.one(session, caller.project_id, feedback_id)
        [view] = await queries.views(session, caller.project_id, [row])
    return _json(view)


@router.delete("/{feedback_id}", response_model=FeedbackView)
async def take_back(caller: FeedbackCaller, db: DatabaseDep, feedback_id: FeedbackId) -> Response:
    """It stays on record as withdrawn. What has been withdrawn or replaced before is left as it is."""
    async with db.write() as session:
        view = await withdrawal.withdraw(session, caller.project_id, feedback_id)
    return _json(view)


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")
