"""Many pieces of feedback in one request and one transaction, none of which spoils another."""

from typing import Any

from app.core.database import Database
from app.core.errors import AttuneError, BadRequest
from app.feedback import kinds, service, submission
from app.feedback.feedback_writer import find
from app.feedback.kinds import FeedbackCreate
from app.feedback.service import Receipt


async def submit(db: Database, project_id: str, bodies: list[Any], header_key: str | None) -> list[dict[str, Any]]:
    """A result for each, in order, all of them durable."""
    outcomes: dict[int, Receipt | AttuneError] = {}
    said: dict[int, FeedbackCreate] = {}
    for number, body in enumerate(bodies):
        try:
            said[number] = _read(body)
        except BadRequest as error:
            outcomes[number] = error
    found = dict(zip(said, await find(db, project_id, list(said.values())), strict=True))
    items = {
        number: submission.make(
            project_id, one, bodies[number], header_key=_key(one, header_key, number), found=found[number]
        )
        for number, one in said.items()
    }
    if items:
        told = await db.run_write(lambda connection: service.submit_many(connection, list(items.values())))
        outcomes |= zip(items, told, strict=True)
    return [_result(number, outcomes[number]) for number in range(len(bodies))]


def _read(body: Any) -> FeedbackCreate:
    if not isinstance(body, dict):
        raise BadRequest("An item is a JSON object.", code="invalid_value")
    return kinds.read(body)


def _key(said: FeedbackCreate, header_key: str | None, number: int) -> str | None:
    """Example: ("nightly", 7) -> "nightly/7"."""
    return None if header_key is None or said.id is not None else f"{header_key}/{number}"


def _result(number: int, outcome: Receipt | AttuneError) -> dict[str, Any]:
    if isinstance(outcome, AttuneError):
        return {"index": number, "status": outcome.status, **outcome.body()}
    return {"index": number, "status": 200 if outcome.replayed else 201, "feedback": outcome.view}
