"""Authentication: how long API keys are cached, and whether their turns may be trained on."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession

from app.core import cache
from app.core.database import Database, now
from app.models import ApiKey, Project
from app.projects import service as projects
from app.projects.auth import ApiKeyCache
from tests.app.projects.test_endpoints import bearer, create_key
from tests.support.deployment import Harness


@contextmanager
def statements(db: Database) -> Iterator[list[str]]:
    """Yield the list of executed statements with their parameters."""
    executed: list[str] = []

    def record(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        executed.append(f"{statement} {parameters}")

    event.listen(db.engine.sync_engine, "before_cursor_execute", record)
    yield executed
    event.remove(db.engine.sync_engine, "before_cursor_execute", record)


async def new_key(harness: Harness, **values: Any) -> str:
    async with harness.db.write() as session:
        _, key = await projects.create_key(session, (await harness.policy()).project_id, **values)
    return key


async def change(harness: Harness, key: str, **values: Any) -> None:
    [row] = [row for row in await harness.all(ApiKey) if row.sha256 == projects.digest_key(key)]
    async with harness.db.write() as session:
        locked = await session.get_one(ApiKey, row.id)
        for name, value in values.items():
            setattr(locked, name, value)


async def test_key_is_read_once_and_only_its_hash_is_sent(harness: Harness) -> None:
    key_cache = ApiKeyCache(60)
    with statements(harness.db) as executed:
        callers = [await key_cache.find(harness.db, harness.key) for _ in range(5)]
    key_queries = [line for line in executed if "api_keys" in line]
    assert len(key_queries) == 1 and len(set(callers)) == 1 and callers[0] is not None
    assert projects.digest_key(harness.key) in key_queries[0] and harness.key not in str(executed)


async def test_unknown_keys_are_not_cached(harness: Harness) -> None:
    key_cache = ApiKeyCache(60)
    with statements(harness.db) as executed:
        assert [await key_cache.find(harness.db, "sk-attune-nobody") for _ in range(3)] == [None] * 3
    assert len([line for line in executed if "api_keys" in line]) == 3


async def test_nothing_is_cached_with_a_cache_time_of_zero(harness: Harness) -> None:
    key_cache = ApiKeyCache(0)
    await key_cache.find(harness.db, harness.key)
    await change(harness, harness.key, revoked_at=now())
    assert await key_cache.find(harness.db, harness.key) is None


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return a clock that only the test advances, so that no key expires by accident on a busy machine."""
    clock = Clock()
    monkeypatch.setattr(cache, "time", clock)
    return clock


async def test_key_revoked_by_another_process_is_refused_after_the_cache_time(harness: Harness, clock: Clock) -> None:
    key_cache = ApiKeyCache(5)
    await key_cache.find(harness.db, harness.key)
    await change(harness, harness.key, revoked_at=now())
    clock.seconds += 4.9
    assert await key_cache.find(harness.db, harness.key) is not None
    clock.seconds += 0.2
    assert await key_cache.find(harness.db, harness.key) is None


async def test_expired_key_is_refused_however_long_keys_are_cached(harness: Harness, clock: Clock) -> None:
    key_cache, key = ApiKeyCache(3600), await new_key(harness, expires_in=600)
    assert await key_cache.find(harness.db, key) is not None
    await change(harness, key, expires_at=now() - 1.0)  # the same time has passed on the database clock
    assert await key_cache.find(harness.db, key) is not None, "the key was valid for ten more minutes when it was read"
    clock.seconds += 601
    assert await key_cache.find(harness.db, key) is None


async def test_key_that_was_being_read_during_a_change_is_not_cached(harness: Harness) -> None:
    key_cache = ApiKeyCache(60)

    class SlowDatabase(Database):
        @asynccontextmanager
        async def read(self) -> AsyncIterator[AsyncSession]:  # type: ignore[override]
            async with super().read() as session:
                yield session
            await change(harness, harness.key, revoked_at=now())  # commits before the read returns
            key_cache.forget()

    slow_db = SlowDatabase(harness.settings.database_url)
    assert await key_cache.find(slow_db, harness.key) is not None
    assert await key_cache.find(harness.db, harness.key) is None
    await slow_db.close()


async def test_cache_size_is_limited(harness: Harness) -> None:
    key_cache, new_keys = ApiKeyCache(60, max_size=2), [await new_key(harness) for _ in range(3)]
    for key in new_keys:
        await key_cache.find(harness.db, key)
    with statements(harness.db) as executed:
        for key in reversed(new_keys):
            await key_cache.find(harness.db, key)
    assert len([line for line in executed if "api_keys" in line]) == 1


@pytest.mark.parametrize(
    ("project", "key", "consent"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True), (True, True, True)],
)
async def test_consent_of_the_key_overrides_the_project(
    harness: Harness, project: bool, key: bool | None, consent: bool
) -> None:
    async with harness.db.write() as session:
        (await session.get_one(Project, (await harness.policy()).project_id)).train = project
    caller = await ApiKeyCache(60).find(harness.db, await new_key(harness, train=key))
    assert caller is not None and caller.train is consent


async def test_unknown_revoked_and_expired_keys_get_identical_responses(harness: Harness) -> None:
    revoked, expired = (await create_key(harness))["key"], await new_key(harness, expires_in=-1.0)
    await change(harness, revoked, revoked_at=now())
    answers = [await harness.api.get("/v1/models", headers=bearer(key)) for key in ("sk-attune-x", revoked, expired)]
    assert {answer.status_code for answer in answers} == {401} and len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic abc", "sk-attune-x", "bearer\tx"])
async def test_header_without_a_key_is_401(harness: Harness, header: str) -> None:
    answer = await harness.api.get("/v1/models", headers={"authorization": header})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_consent_withdrawn_by_this_process_applies_at_once(harness: Harness) -> None:
    key = await new_key(harness)
    assert (await harness.api.get("/v1/models", headers=bearer(key))).status_code == 200
    key_cache = harness.api._transport.app.services.get(ApiKeyCache)  # type: ignore[attr-defined]
    before = await key_cache.find(harness.db, key)
    await harness.api.patch("/v1/project", json={"train": False})
    after = await key_cache.find(harness.db, key)
    assert before is not None and after is not None and (before.train, after.train) == (True, False)
