"""Feedback of many requests, one commit."""

from fastapi import Request

from app.core.database import Database
from app.core.group_commit import GroupCommit
from app.core.services import services_of
from app.feedback import service, turn_metadata
from app.feedback.kinds import FeedbackCreate
from app.feedback.schemas import Choice, MetadataTarget
from app.feedback.service import Receipt
from app.feedback.submission import Item


class FeedbackWriter(GroupCommit[Item, Receipt]):
    """One for each API process."""

    def __init__(self, db: Database) -> None:
        super().__init__(db, service.submit_many)

    @classmethod
    def of(cls, request: Request) -> "FeedbackWriter":
        return services_of(request).get(cls)


async def find(db: Database, project_id: str, said: list[FeedbackCreate]) -> list[Choice | None]:
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
