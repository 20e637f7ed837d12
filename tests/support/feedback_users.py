"""Who else is there, and what an answer looks like from far."""

import httpx2

from app.models import Project, TurnMetadata, new_id
from app.projects import keys
from tests.support.deployment import Harness


def shape(answer: httpx2.Response) -> tuple[int, set[str]]:
    return answer.status_code, set(answer.json()["error"])


async def stranger(harness: Harness, **values: object) -> dict[str, str]:
    """Headers of a key of another project."""
    async with harness.db.write() as session:
        project = Project(id=new_id("proj"), name=new_id("name"))
        session.add(project)
        await session.flush()
        _, key = await keys.create(session, project.id)
    return {"authorization": f"Bearer {key}"}


async def tag(harness: Harness, turn_id: str, **pairs: str) -> None:
    """The turn's chat request came with these as metadata."""
    project_id = (await harness.policy()).project_id
    async with harness.db.write() as session:
        session.add_all(
            TurnMetadata(turn_id=turn_id, key=key, value=value, project_id=project_id) for key, value in pairs.items()
        )
