"""API keys: stored as a hash, revocable, and valid for one project."""

from app.core.database import now
from app.models import ApiKey, Project
from app.projects import service as projects
from tests.support.deployment import Harness


async def test_only_the_hash_is_stored(harness: Harness) -> None:
    [row] = await harness.all(ApiKey)
    assert row.sha256 == projects.digest_key(harness.key) and harness.key not in str(vars(row))


async def test_revoked_key_is_unknown(harness: Harness) -> None:
    async with harness.db.write() as session:
        [row] = await harness.all(ApiKey)
        (await session.get_one(ApiKey, row.id)).revoked_at = now()
    assert (await harness.api.get("/v1/models")).status_code == 401


async def test_completion_of_another_project_is_like_an_unknown_one(harness: Harness) -> None:
    async with harness.db.write() as session:
        session.add(Project(id="proj-other", name="other"))
        await session.flush()
        _, key = await projects.create_key(session, "proj-other")
    turn = await harness.turn()
    other_headers = {"authorization": f"Bearer {key}"}
    body = {"completion_id": turn.id, "kind": "binary", "value": True}
    foreign = await harness.api.post("/v1/feedback", json=body, headers=other_headers)
    unknown = await harness.api.post("/v1/feedback", json=body | {"completion_id": "chatcmpl-x"}, headers=other_headers)
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text.replace(turn.id, "ID") == unknown.text.replace("chatcmpl-x", "ID")
