"""Routes of Langfuse (/api/public) for what its clients send on their own: scores, events, traces."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.security import HTTPBasic, HTTPBasicCredentials
from sqlalchemy import select
from starlette.responses import Response

from app.core.errors import AttuneError, BadRequest, Unauthorized
from app.core.http import json_body, json_response, parse_body, services_of, settings_of, stream_body
from app.core.rate_limits import RateLimiter
from app.langfuse import service
from app.langfuse.errors import RESPONSES
from app.langfuse.schemas import (
    MAX_ID,
    SCORE_EVENT,
    IngestionRequest,
    IngestionResults,
    Score,
    ScoreCreated,
    ScoreEvent,
    ScoreRequest,
    ScoresAccepted,
    ScoresPartlyAccepted,
    parse_scores,
)
from app.langfuse.service import Problem, ScoreService
from app.models import Project
from app.projects.auth import (
    Caller,
    DatabaseDep,
    application_slot,
    authenticate,
    limits_of,
    sent_credential,
)
from app.projects.scopes import checks_scope

router = APIRouter(prefix="/api/public", tags=["langfuse"], responses=RESPONSES)
BASIC = HTTPBasic(auto_error=False, scheme_name="langfuse", description="the secret key is an API key: sk-attune-…")
MAX_VALUES = 100_000
PROTOBUF = "application/x-protobuf"


@checks_scope("feedback")
async def authenticate_sender(
    request: Request, db: DatabaseDep, credentials: Annotated[HTTPBasicCredentials | None, Depends(BASIC)]
) -> AsyncIterator[Caller]:
    """Authenticate the API key, Langfuse's secret key, and apply its rate limits. The public key may be any."""
    key = credentials.password if credentials is not None else sent_credential(request)
    if not key:
        raise Unauthorized("Give an API key of Attune (sk-attune-…) as the secret key of Langfuse.")
    caller = await authenticate(request, db, "feedback", key)
    async with application_slot(request, caller):
        yield caller


Sender = Annotated[Caller, Depends(authenticate_sender)]


@router.post(
    "/scores",
    response_model=ScoreCreated,
    responses={
        202: {"model": ScoresAccepted, "description": "of an array: all were taken"},
        207: {"model": ScoresPartlyAccepted, "description": "of an array: some are faulty"},
    },
)
async def create_scores(
    request: Request,
    sender: Sender,
    body: Annotated[
        Score | list[object], json_body(ScoreRequest, parse=parse_scores, max_values=MAX_VALUES, takes_arrays=True)
    ],
) -> Response:
    """Record a score as feedback, or an array of up to 1,000. A score with a known `id` replaces the one before."""
    items = body if isinstance(body, list) else [body]
    outcomes = await _take(request, sender, [_read_score(item) for item in items])
    if not isinstance(body, list):
        [outcome] = outcomes
        return _refuse(outcome) if isinstance(outcome, Problem) else json_response({"id": outcome.id})
    problems = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    if passing := [problem for problem in problems if problem.is_passing]:
        # Clients send an array again, and no part of it. What was taken has its key, and is taken once.
        return _refuse(passing[0])
    if not problems:
        return json_response({"message": "Accepted"}, 202)
    errors = [{"message": problem.message} for problem in problems]
    return json_response({"accepted": len(items) - len(errors), "rejected": len(errors), "errors": errors}, 207)


@router.delete("/scores/{score_id}", status_code=202)
async def delete_score(
    sender: Sender, db: DatabaseDep, score_id: Annotated[str, Path(min_length=1, max_length=MAX_ID)]
) -> dict[str, str]:
    """Withdraw the feedback of a score. It need not exist: its reply may have been another model's."""
    await service.delete_score(db, sender, score_id)
    return {"message": "The score is deleted."}


@router.post("/ingestion", status_code=207, response_model=IngestionResults)
async def ingest(
    request: Request,
    sender: Sender,
    body: Annotated[IngestionRequest, json_body(IngestionRequest, max_values=MAX_VALUES)],
) -> Response:
    """Take a batch of up to 1,000 events: scores are recorded, and all other events are dropped."""
    scores: dict[int, Score | AttuneError] = {
        index: _read_event(event)
        for index, event in enumerate(body.batch)
        if not isinstance(event, dict) or event.get("type") == SCORE_EVENT
    }
    outcomes = dict(zip(scores, await _take(request, sender, list(scores.values())), strict=True))
    successes, errors = [], []
    for index, event in enumerate(body.batch):
        id = str(event.get("id", "")) if isinstance(event, dict) else ""
        outcome = outcomes.get(index)
        if isinstance(outcome, Problem):
            errors.append({"id": id, "status": outcome.status, "message": outcome.message, "error": outcome.code})
        else:
            successes.append({"id": id, "status": 201})
    return json_response({"successes": successes, "errors": errors}, 207)


@router.post("/otel/v1/traces", response_class=Response)
async def drop_traces(request: Request, sender: Sender) -> Response:
    """Take traces of OpenTelemetry and drop them unread. Langfuse's clients send them beside the scores."""
    async for _ in stream_body(request, settings_of(request).server.max_body_bytes, "body"):
        pass
    if request.headers.get("content-type", "").startswith("application/json"):
        return json_response({})
    return Response(b"", media_type=PROTOBUF)


@router.get("/projects")
async def list_projects(sender: Sender, db: DatabaseDep) -> dict[str, object]:
    """Return the project of the API key, by which clients check their keys and learn the project's id."""
    async with db.read() as session:
        name = await session.scalar(select(Project.name).where(Project.id == sender.project_id))
    organization = {"id": "attune", "name": "Attune"}
    return {"data": [{"id": sender.project_id, "name": name, "organization": organization, "metadata": {}}]}


def _refuse(problem: Problem) -> Response:
    return json_response({"message": problem.message, "error": problem.code}, problem.status)


async def _take(request: Request, sender: Caller, scores: list[Score | AttuneError]) -> list[service.Outcome]:
    services, limit = services_of(request), limits_of(request, sender).feedback_per_minute
    if scores:
        await services.get(RateLimiter).count_feedback(sender.project_id, len(scores), limit)
    return await services.get(ScoreService).take(sender, scores)


def _read_score(item: Any) -> Score | AttuneError:
    """Return the score, or the error that says what is wrong with it."""
    try:
        return item if isinstance(item, Score) else parse_body(Score, item)
    except AttuneError as error:
        return error


def _read_event(event: object) -> Score | AttuneError:
    try:
        if not isinstance(event, dict):
            raise BadRequest("An event must be a JSON object.", code="invalid_value")
        return parse_body(ScoreEvent, event).to_score()
    except AttuneError as error:
        return error
