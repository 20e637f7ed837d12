"""/v1/feedback: submit, and read back by completion."""

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from app.auth import DatabaseDep, FeedbackCaller
from app.body import JsonBody, parse
from app.errors import NotFound
from app.feedback import repository, service
from app.feedback.schemas import FeedbackRequest, FeedbackView

router = APIRouter(prefix="/v1/feedback", tags=["feedback"])


@router.post("", status_code=201, response_model=FeedbackView)
async def submit(
    caller: FeedbackCaller,
    db: DatabaseDep,
    body: JsonBody,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Response:
    request = parse(FeedbackRequest, body)
    async with db.write() as session:
        row, replayed = await service.submit(session, caller.project_id, request, idempotency_key)
        view = FeedbackView.of(row).model_dump(mode="json")
    headers = {"idempotent-replayed": "true"} if replayed else {}
    return Response(orjson.dumps(view), 200 if replayed else 201, headers, media_type="application/json")


@router.get("")
async def of_completion(
    caller: FeedbackCaller,
    db: DatabaseDep,
    completion_id: Annotated[str, Query(min_length=1, max_length=255)],
) -> dict[str, Any]:
    async with db.read() as session:
        if await repository.turn_of(session, caller.project_id, completion_id) is None:
            raise NotFound(f"There is no completion '{completion_id}'.", param="completion_id")
        rows = await repository.of_turn(session, completion_id)
    return {"object": "list", "data": [FeedbackView.of(row) for row in rows]}
