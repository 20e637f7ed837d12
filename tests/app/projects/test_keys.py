"""Keys: kept as a hash, of one project, with scopes, and revocable."""

from app.core.database import now
from app.models import ApiKey, Project
from app.projects import keys
from tests.support.deployment import Ring


async def test_only_the_hash_is_kept(ring: Ring) -> None:
    [row] = await ring.all(ApiKey)
    assert row.sha256 == keys.digest(ring.key) and ring.key not in str(vars(row))


async def test_a_revoked_key_is_unknown(ring: Ring) -> None:
    async with ring.db.write() as session:
        [row] = await ring.all(ApiKey)
        (await session.get_one(ApiKey, row.id)).revoked_at = now()
    assert (await ring.api.get("/v1/models")).status_code == 401


async def test_another_projects_completion_is_answered_like_an_unknown_one(ring: Ring) -> None:
    async with ring.db.write() as session:
        session.add(Project(id="proj-other", name="other"))
        await session.flush()
        _, key = await keys.create(session, "proj-other")
    turn = await ring.turn()
    stranger = {"authorization": f"Bearer {key}"}
    body = {"completion_id": turn.id, "kind": "binary", "value": True}
    foreign = await ring.api.post("/v1/feedback", json=body, headers=stranger)
    unknown = await ring.api.post("/v1/feedback", json=body | {"completion_id": "chatcmpl-x"}, headers=stranger)
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text.replace(turn.id, "ID") == unknown.text.replace("chatcmpl-x", "ID")
