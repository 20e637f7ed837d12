"""/v1/audit: order, filters, pages and access."""

from typing import Any

from app.models import Audit, AuditAction, Project, record_audit
from tests.support.deployment import Harness

ACTIONS = (AuditAction.DEPLOYMENT_DEPLOYED, AuditAction.VERSION_REJECTED)


async def entries(harness: Harness, **params: Any) -> dict[str, Any]:
    answer = await harness.api.get("/v1/audit", params=params)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def fill(harness: Harness) -> str:
    [project] = await harness.all(Project)
    for number in range(5):
        async with harness.db.write() as session:
            actor = "guard" if number % 2 else "sk-attune-1"
            record_audit(
                session, actor, ACTIONS[number % 2], f"shop@v{number}", "why", project_id=project.id, number=number
            )
    async with harness.db.write() as session:
        record_audit(session, "nobody", ACTIONS[0], "bread@v0", project_id="another")
    return str(project.id)


async def test_newest_entries_of_the_own_project_come_first(harness: Harness) -> None:
    await fill(harness)
    rows = (await entries(harness))["data"]
    assert [row["subject"] for row in rows] == [f"shop@v{number}" for number in (4, 3, 2, 1, 0)]
    assert (rows[0]["actor"], rows[0]["reason"], rows[0]["details"]) == ("sk-attune-1", "why", {"number": 4})


async def test_filters_match_exactly_and_combine(harness: Harness) -> None:
    await fill(harness)

    async def numbers(**params: Any) -> list[int]:
        return [row["details"]["number"] for row in (await entries(harness, **params))["data"]]

    assert await numbers(action=ACTIONS[1]) == [3, 1]
    assert await numbers(actor="guard", subject="shop@v3") == [3]
    assert await numbers(subject="shop") == []
    at = {row.details["number"]: row.created_at for row in await harness.all(Audit) if row.details}
    assert await numbers(since=at[3]) == [number for number in (4, 3, 2, 1, 0) if at[number] >= at[3]]
    assert await numbers(since=at[4] + 1) == []


async def test_pages_work_in_both_orders(harness: Harness) -> None:
    await fill(harness)
    for order, expected in (("desc", [4, 3, 2, 1, 0]), ("asc", [0, 1, 2, 3, 4])):
        numbers_on_pages: list[int] = []
        after: dict[str, int] = {}
        while True:
            page = await entries(harness, order=order, limit=2, **after)
            numbers_on_pages += [row["details"]["number"] for row in page["data"]]
            if not page["has_more"]:
                break
            after = {"after": page["last_number"]}
        assert numbers_on_pages == expected


async def test_key_without_the_admin_scope_is_refused(harness: Harness) -> None:
    key = (await harness.api.post("/v1/keys", json={"scopes": ["chat", "feedback"]})).json()["key"]
    answer = await harness.api.get("/v1/audit", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 403
