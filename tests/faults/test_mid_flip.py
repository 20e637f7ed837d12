"""The database connection is lost during a deployment change: before a statement, the commit, or its answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from sqlalchemy import make_url, update
from sqlalchemy.exc import SQLAlchemyError

from app.models import Version, VersionState
from tests.faults.moves import MOVES, Side, keeps_the_rules, line, side, state, stopped
from tests.faults.suite.proxy import Proxy
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

DONE = ("200 None", "done")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True),
]


@pytest.fixture
async def behind(harness: Harness, scripted: ScriptedEngine, door: Proxy) -> AsyncIterator[Side]:
    """An API process and a publisher whose way to the database leads through that door."""
    url = make_url(harness.settings.database).set(host="127.0.0.1", port=door.port)
    through = harness.settings.model_copy(update={"database_url": url.render_as_string(hide_password=False)})
    async with side(through, harness.key) as behind:
        yield behind


@pytest.mark.parametrize("move", ["bring home", "publish", "roll back to v0", "deploy v1"])
@pytest.mark.parametrize("lost", ["the question", "the answer"])
@pytest.mark.slow
async def test_operation_with_a_lost_connection_is_atomic_and_can_be_retried(
    harness: Harness, door: Proxy, behind: Side, move: str, lost: str
) -> None:
    async def cut() -> None:
        if lost == "the question":
            await door.refuse()
        else:
            door.lose_answers()

    newest = VersionState.TRAINED if move == "bring home" else VersionState.VERIFIED
    policy = await line(harness, newest)
    before = await state(harness, policy)
    await MOVES[move](behind, policy)
    after = await state(harness, policy)
    at, commits, ends = 1, 0, [0, 0]
    while True:
        policy = await line(harness, newest)
        with stopped(behind, at, cut) as passed:
            told = await tried(behind, move, policy)
        if len(passed) < at and told in DONE:
            if commits:
                break
            at = 1  # what is looked up now and then moved the others, and no cut met the commit: from the start
            continue
        if len(passed) < at:
            continue  # a connection of the pool that an earlier cut left dead: once more
        found, where = (
            await settled(harness, policy, before),
            f"{lost} lost at {passed[at - 1]!r}, point {at} of {move!r}",
        )
        keeps_the_rules(found)
        assert found in (before, after), where
        assert told not in DONE or found == after, f"{where}: said to be done, and it is not"
        if found != before:
            assert passed[at - 1] == "COMMIT" or "COMMIT" in passed[: at - 1], where
        commits += passed[at - 1] == "COMMIT"
        ends[found == after] += 1
        await door.mend()
        async with asyncio.timeout(30):  # as the sweep rings again, and as a client tries again
            while await tried(behind, move, policy) not in DONE or await state(harness, policy) != after:
                await expired(harness)
                await asyncio.sleep(0.05)
        at += 1
    print(f"\n{move}, {lost} lost: {at - 1} points, {commits} commits; not happened {ends[0]}, happened {ends[1]}")
    assert commits >= 1 and ends[0] and (ends[1] or lost == "the question")


async def expired(harness: Harness) -> None:
    """What was claimed by a process that then lost its connection is free when its lease has run out."""
    async with harness.db.write() as session:
        await session.execute(update(Version).values(lease_until=0.0))


async def tried(behind: Side, move: str, policy: str) -> str:
    with suppress(SQLAlchemyError):
        return await MOVES[move](behind, policy)
    return "the publisher's task failed"


async def settled(harness: Harness, policy: str, before: dict[str, object]) -> dict[str, object]:
    """A COMMIT that was sent may still be under way: a while is given to it, and either end is right."""
    found = await state(harness, policy)
    for _ in range(4):
        if found != before:
            break
        await asyncio.sleep(0.02)
        found = await state(harness, policy)
    return found
