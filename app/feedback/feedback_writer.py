"""Feedback of many requests, one commit."""

from fastapi import Request

from app.core.database import Database
from app.core.group_commit import Gather
from app.feedback import service, turn_metadata
from app.feedback.kinds import Said
from app.feedback.schemas import Choice, MetadataTarget
from app.feedback.service import Receipt
from app.feedback.submission import Item


class Intake(Gather[Item, Receipt]):
    """One for each API process, made when its first feedback comes."""

    @classmethod
    def of(cls, request: Request) -> "Intake":
        state = request.app.state
        if not hasattr(state, "feedback_intake"):
            state.feedback_intake = cls(state.db, service.submit_many)
        intake: Intake = state.feedback_intake
        return intake


async def find(db: Database, project_id: str, said: list[Said]) -> list[Choice | None]:
    """The turns that metadata points at; None for everything that names its target by itself."""
    asked = {
        number: about.metadata
        for number, request in enumerate(said)
        if isinstance(about := request.about(), MetadataTarget)
    }
    if not asked:
        return [None] * len(said)
    async with db.read() as session:
        found = dict(zip(asked, await turn_metadata.newest(session, project_id, list(asked.values())), strict=True))
    return [found.get(number) for number in range(len(said))]
