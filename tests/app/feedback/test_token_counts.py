"""The audit has an entry for each minute and key that created browser tokens, with their exact number."""

import asyncio

import pytest
from sqlalchemy import update

from app.core.database import Database
from app.feedback.token_counts import TokenCounter, TokenRequester, record_counts
from app.models import Audit, AuditAction, Project, TokenCount
from tests.support.deployment import Harness
from tests.support.feedback_users import create_other_project_key
from workers.reconcile import reconcile

LONG_MINUTE = 10**10


@pytest.fixture(autouse=True)
def long_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a minute last for centuries, so that none ends during a test."""
    monkeypatch.setattr("app.feedback.token_counts.MINUTE_SECONDS", LONG_MINUTE)


async def create_tokens(harness: Harness, completion_id: str, number: int, key: str | None = None) -> None:
    body = {"completion_id": completion_id, "kinds": ["binary"]}
    headers = {"authorization": f"Bearer {key or harness.key}"}
    requests = [harness.api.post("/v1/feedback/tokens", json=body, headers=headers) for _ in range(number)]
    assert {response.status_code for response in await asyncio.gather(*requests)} == {201}


async def end_minute(harness: Harness) -> None:
    """Let the tokens that were counted belong to the minute before."""
    async with harness.db.write() as session:
        await session.execute(update(TokenCount).values(minute=TokenCount.minute - 1))


async def entries(harness: Harness) -> list[tuple[str, int]]:
    """Return actor and number of tokens of each entry."""
    rows = [row for row in await harness.all(Audit) if row.action == AuditAction.TOKEN_CREATED]
    return [(row.actor, row.details["tokens"]) for row in rows]


async def test_a_minutes_tokens_are_one_entry_for_each_key(harness: Harness) -> None:
    turn = await harness.turn()
    other = (await harness.api.post("/v1/keys", json={"name": "other"})).json()["key"]
    await create_tokens(harness, turn.id, 40)
    await create_tokens(harness, turn.id, 20, other)
    assert await entries(harness) == []
    await end_minute(harness)
    await reconcile(harness.db, harness.settings)
    assert sorted(await entries(harness)) == sorted([(harness.key[:16], 40), (other[:16], 20)])
    assert await harness.all(TokenCount) == []
    [entry] = [row for row in await harness.all(Audit) if row.actor == other[:16]]
    assert entry.details["since"] == -LONG_MINUTE and entry.subject == other[:16]
    verified = (await harness.api.get("/v1/audit/verify")).json()
    assert verified["ok"] and verified["unsealed"] == 0


async def test_the_present_minute_is_not_recorded_before_it_has_ended(harness: Harness) -> None:
    turn = await harness.turn()
    await create_tokens(harness, turn.id, 1)
    assert await record_counts(harness.db) == 0
    assert [row.num_tokens for row in await harness.all(TokenCount)] == [1]


async def test_tokens_that_are_counted_late_become_another_entry(harness: Harness) -> None:
    turn = await harness.turn()
    for number in (3, 2):
        await create_tokens(harness, turn.id, number)
        await end_minute(harness)
        assert await record_counts(harness.db) == 1
    assert [number for _, number in await entries(harness)] == [3, 2]


async def test_counts_beyond_a_page_are_recorded_too(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.feedback.token_counts.MAX_ROWS", 2)
    project_id = (await harness.policy()).project_id
    counter = TokenCounter(harness.db)
    await asyncio.gather(*[counter.submit(TokenRequester(project_id, f"key-{number}")) for number in range(5)])
    await end_minute(harness)
    assert await record_counts(harness.db) == 5
    assert sorted(await entries(harness)) == [(f"key-{number}", 1) for number in range(5)]


async def test_processes_count_together_and_share_the_secrets_of_projects(harness: Harness) -> None:
    """Some of the requests are the first ones of their project: one secret is created for each."""
    await create_other_project_key(harness)
    project_ids = [project.id for project in await harness.all(Project)]
    assert len(project_ids) == 2
    requesters = [TokenRequester(project_id, "key") for project_id in project_ids] * 20
    databases = [Database(harness.settings.database_url) for _ in range(2)]
    try:
        secrets = await asyncio.gather(
            *[
                counter.submit(requester)
                for counter in [TokenCounter(db) for db in databases]
                for requester in requesters
            ]
        )
    finally:
        for db in databases:
            await db.close()
    by_project = {(requester.project_id, secret) for requester, secret in zip(requesters * 2, secrets, strict=True)}
    assert len(by_project) == len(project_ids)
    totals: dict[str, int] = {}
    for row in await harness.all(TokenCount):
        totals[row.project_id] = totals.get(row.project_id, 0) + row.num_tokens
    assert totals == dict.fromkeys(project_ids, 40)
