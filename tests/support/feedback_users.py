"""Other projects' keys, turn metadata and error shapes for feedback tests."""

import httpx2

from app.models import Project, TurnMetadata, new_id
from app.projects import service as projects
from tests.support.deployment import Harness


def error_shape(answer: httpx2.Response) -> tuple[int, set[str]]:
    return answer.status_code, set(answer.json()["error"])


async def create_other_project_key(harness: Harness) -> dict[str, str]:
    """Create another project and return headers with its API key."""
    async with harness.db.write() as session:
        project = Project(id=new_id("proj"), name=new_id("name"))
        session.add(project)
        await session.flush()
        _, key = await projects.create_key(session, project.id)
    return {"authorization": f"Bearer {key}"}


async def add_metadata(harness: Harness, turn_id: str, **pairs: str) -> None:
    """Add metadata to a turn, as its chat request would have."""
    project_id = (await harness.policy()).project_id
    async with harness.db.write() as session:
        session.add_all(
            TurnMetadata(turn_id=turn_id, key=key, value=value, project_id=project_id) for key, value in pairs.items()
        )
