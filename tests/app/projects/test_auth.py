"""Callers: who is known, for how long, and whether their turns may be learned from."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, now
from app.models import ApiKey, Project
from app.projects import auth, keys
from app.projects.auth import ApiKeyCache
from tests.app.projects.test_endpoints import bearer, made
from tests.support.deployment import Harness


@contextmanager
def statements(db: Database) -> Iterator[list[str]]:
    """Every statement with its parameters, while this lasts."""
    heard: list[str] = []

    def hear(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        heard.append(f"{statement} {parameters}")

    event.listen(db.engine.sync_engine, "before_cursor_execute", hear)
    yield heard
    event.remove(db.engine.sync_engine, "before_cursor_execute", hear)


async def new(harness: Harness, **values: Any) -> str:
    async with harness.db.write() as session:
        _, key = await keys.create(session, (await harness.policy()).project_id, **values)
    return key


async def change(harness: Harness, key: str, **values: Any) -> None:
    [row] = [row for row in await harness.all(ApiKey) if row.sha256 == keys.digest(key)]
    async with harness.db.write() as session:
        found = await session.get_one(ApiKey, row.id)
        for name, value in values.items():
            setattr(found, name, value)


async def test_a_key_is_read_once_in_a_while_and_only_its_hash_is_sent(harness: Harness) -> None:
    known = ApiKeyCache(60)
    with statements(harness.db) as heard:
        callers = [await known.find(harness.db, harness.key) for _ in range(5)]
    selects = [line for line in heard if "api_keys" in line]
    assert len(selects) == 1 and len(set(callers)) == 1 and callers[0] is not None
    assert keys.digest(harness.key) in selects[0] and harness.key not in str(heard)


async def test_a_miss_is_never_remembered(harness: Harness) -> None:
    known = ApiKeyCache(60)
    with statements(harness.db) as heard:
        assert [await known.find(harness.db, "sk-attune-nobody") for _ in range(3)] == [None] * 3
    assert len([line for line in heard if "api_keys" in line]) == 3


async def test_without_a_time_nothing_is_remembered(harness: Harness) -> None:
    known = ApiKeyCache(0)
    await known.find(harness.db, harness.key)
    await change(harness, harness.key, revoked_at=now())
    assert await known.find(harness.db, harness.key) is None


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of this process's own, and moved by hand: a busy machine must not make a key old."""
    clock = Clock()
    monkeypatch.setattr(auth, "time", clock)
    return clock


async def test_a_key_revoked_elsewhere_is_out_when_its_time_is_up(harness: Harness, clock: Clock) -> None:
    known = ApiKeyCache(5)
    await known.find(harness.db, harness.key)
    await change(harness, harness.key, revoked_at=now())
    clock.seconds += 4.9
    assert await known.find(harness.db, harness.key) is not None
    clock.seconds += 0.2
    assert await known.find(harness.db, harness.key) is None


async def test_an_expired_key_is_out_however_long_keys_are_remembered(harness: Harness, clock: Clock) -> None:
    known, key = ApiKeyCache(3600), await new(harness, expires_in=600)
    assert await known.find(harness.db, key) is not None
    await change(harness, key, expires_at=now() - 1.0)  # the same time has passed for the database
    assert await known.find(harness.db, key) is not None, "it lived for ten minutes when it was read"
    clock.seconds += 601
    assert await known.find(harness.db, key) is None


async def test_what_was_read_before_a_change_is_not_kept_after_it(harness: Harness) -> None:
    known = ApiKeyCache(60)

    class Slow(Database):
        @asynccontextmanager
        async def read(self) -> AsyncIterator[AsyncSession]:
            async with super().read() as session:
                yield session
            await change(harness, harness.key, revoked_at=now())  # commits while the answer is on its way
            known.forget()

    slow = Slow(harness.settings.database)
    assert await known.find(slow, harness.key) is not None
    assert await known.find(harness.db, harness.key) is None
    await slow.close()


async def test_only_so_many_keys_are_remembered(harness: Harness) -> None:
    known, several = ApiKeyCache(60, most=2), [await new(harness) for _ in range(3)]
    for key in several:
        await known.find(harness.db, key)
    with statements(harness.db) as heard:
        for key in reversed(several):
            await known.find(harness.db, key)
    assert len([line for line in heard if "api_keys" in line]) == 1


@pytest.mark.parametrize(
    ("project", "key", "consent"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True), (True, True, True)],
)
async def test_the_keys_word_on_learning_goes_before_the_projects(
    harness: Harness, project: bool, key: bool | None, consent: bool
) -> None:
    async with harness.db.write() as session:
        (await session.get_one(Project, (await harness.policy()).project_id)).train = project
    caller = await ApiKeyCache(60).find(harness.db, await new(harness, train=key))
    assert caller is not None and caller.train is consent


async def test_unknown_revoked_and_expired_keys_are_answered_byte_for_byte_alike(harness: Harness) -> None:
    revoked, expired = (await made(harness))["key"], await new(harness, expires_in=-1.0)
    await change(harness, revoked, revoked_at=now())
    answers = [await harness.api.get("/v1/models", headers=bearer(key)) for key in ("sk-attune-x", revoked, expired)]
    assert {answer.status_code for answer in answers} == {401} and len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic abc", "sk-attune-x", "bearer\tx"])
async def test_a_header_that_names_no_key_is_a_401(harness: Harness, header: str) -> None:
    answer = await harness.api.get("/v1/models", headers={"authorization": header})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_consent_that_is_withdrawn_here_holds_at_once(harness: Harness) -> None:
    key = await new(harness)
    assert (await harness.api.get("/v1/models", headers=bearer(key))).status_code == 200
    known = harness.api._transport.app.services.get(ApiKeyCache)  # type: ignore[attr-defined]
    before = await known.find(harness.db, key)
    await harness.api.patch("/v1/project", json={"train": False})
    after = await known.find(harness.db, key)
    assert before is not None and after is not None and (before.train, after.train) == (True, False)
